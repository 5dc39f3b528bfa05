"""Compute a replica's memory, an outer step's bytes in the bucket and a sync's seconds, from sizes alone.

    P parameters, N replicas, F fragments (a step syncs P/F of them), S = bytes of one pseudogradient in the codec

    bucket, each step      N·S  pseudogradients  +  the mean:   S     reduced in shards (long bodies, 3 replicas)
                                                                4·P/F published in fp32, if at most half of N·S
                                                                0     otherwise
            each snapshot  8·P  θ and momentum, fp32, every snapshot_every steps or as fleet.keep asks
                                (rendezvous/keeping/budget.py: snapshot_period, largest_window)
            once           the start model in its own dtype, and 4·P: snapshot 0, which has no momentum
                           0 for a model of the Hub: every replica downloads it from there
    with [inner.lora] P is the adapter's; the base is on the device and, if it is not on the Hub, in the bucket

    device  weights + gradients + Adam's two moments, each in the model's dtype  (not: activations, generation engine)
            K devices: each has all weights while it generates + a K-th of weights and moments; adapters: all of it
            with [inner.sdpo], [inner.replay], [inner.process]: all weights in the backward pass + a K-th of all four
    host    20·P: θ, momentum, Δ, mean and a body or residual in fp32     measured at the committer's peak: 16.9 to 18.5
                                                                          (docs/benchmarks.md, bench_snapshot)
            K devices: each process has a copy of the model while it loads
Not promised: activations, the caches of generation, Python and CUDA themselves; records and logs (some KB per step).
This file does not import torch.
"""

from dataclasses import dataclass
from math import ceil

from diloco.run.config import AUTO, RunConfig
from diloco.run.sections import keep_bytes
from diloco.run.sizing import compute_seconds_of
from diloco.units import byte_size, duration
from inner.models.naming import is_hub_name
from rendezvous.agreement.rules import Rules, reduces_sharded
from rendezvous.codecs.choose import choose_codec, nominal_ratio, sync_seconds
from rendezvous.keeping.budget import Sizes, largest_window, snapshot_period

LINK = 125e6  # bytes per second, up and down: 1 Gbit/s, as rented machines have to a bucket of their region
HOST = 20
BROADCAST = 3.5  # θ in bf16, and at most the copy that is being written
STATES = 4  # weights, gradients, two moments
DTYPE = {"float32": 4, "bfloat16": 2}
TOKEN = 9  # bytes of a recorded token with its mask and log-prob (inner/rollouts/recording/bundle.py)
NF4 = 0.516  # bytes per parameter of a linear layer: 4 bits, .127 bits of scales (inner/extras/nf4.py)
ADAPTER_WIDTH = 4  # bytes: an adapter is fp32 on every base


@dataclass(frozen=True)
class Footprint:
    """Bytes and seconds.   each_step: left in the bucket by one outer step, without snapshots.   sync_s: over LINK.

    loading: host bytes of all processes' copies while the model loads.
    compute_s: estimated time between two syncs.   period: outer steps between snapshots, with the run's fleet.keep.
    needed: the smallest fleet.keep with room for the blobs that a reader may need; these stay in any case.
    floor, int8_floor: the same size with a snapshot at every step, for the run's codec and for int8.
    back: bytes of each older step that is kept.   rollouts: limit of bytes of one outer step's recorded tokens.
    """

    parameters: int
    codec: str
    devices: int
    device: int
    host: int
    loading: int
    each_step: int
    each_snapshot: int
    once: int
    in_all: int
    sync_s: float
    compute_s: float
    period: int
    needed: int
    floor: int
    int8_floor: int
    back: int
    rollouts: int


def footprint(
    config: RunConfig, parameters: int, replicas: int, steps: int, trained: int | None = None, quantised: int = 0,
    devices: int = 1,
) -> Footprint:  # fmt: skip
    """Compute the footprint of a run. For codec = "auto", use the codec that would be chosen at LINK.

    trained: number of the adapter's parameters; None if the whole model is trained.   quantised: how many of the base's
    parameters have 4 bits on the device (inner.lora.base).   devices: how many a replica has."""
    compute_s = compute_seconds_of(config, parameters)
    base = 0 if trained is None else parameters
    parameters = parameters if trained is None else trained
    codec = config.outer.codec
    fragments = config.outer.fragments
    if codec == AUTO:
        codec, _ = choose_codec(parameters, replicas, LINK, LINK, compute_s)
    width = DTYPE[config.inner.dtype]
    each_step = step_bytes(parameters, replicas, codec, fragments)
    states = width if trained is None else ADAPTER_WIDTH
    each_snapshot = snapshot_bytes(parameters)
    once = 0 if is_hub_name(config.inner.model) else width * base + (states + 4) * parameters
    left = step_sizes(parameters, replicas, codec, fragments)
    every = config.outer.snapshot_every
    keep = keep_bytes(config.fleet.keep) or 0
    period = snapshot_period(keep, every, each_snapshot, left)
    return Footprint(
        parameters=base or parameters,
        codec=codec,
        devices=devices,
        device=ceil(
            width * (base - quantised)
            + NF4 * quantised
            + states_on_device(states, devices, base, holds_whole=_holds_whole(config)) * parameters
        ),
        host=ceil((HOST + BROADCAST * config.fleet.broadcast_weights) * parameters),
        loading=devices * width * (base or parameters),
        each_step=each_step,
        each_snapshot=each_snapshot,
        once=once,
        in_all=once + steps * each_step + ceil(steps / period) * each_snapshot,
        sync_s=sync_seconds(codec, ceil(parameters / fragments), replicas, LINK, LINK) if replicas > 1 else 0.0,
        compute_s=compute_s / fragments,
        period=period,
        needed=largest_window(period, each_snapshot, left),
        floor=largest_window(1, each_snapshot, left),
        int8_floor=largest_window(1, each_snapshot, step_sizes(parameters, replicas, "int8", fragments)),
        back=left.mean or each_step,
        rollouts=recorded_bytes(config, replicas),
    )


def states_on_device(width: int, devices: int, base: int, *, holds_whole: bool = False) -> float:
    """Return the bytes per trained parameter on one of a replica's devices.   width: bytes of a number.   base: an
    adapter's base, which each device has whole; 0 for a whole model, which is in shards (diloco/outer/ranks).

    holds_whole: each device has all weights in the backward pass (inner/train/rank_channels.py)."""
    if devices == 1 or base:
        return STATES * width
    if holds_whole:
        return width * (1 + STATES / devices)
    return width * max(STATES / devices, 1 + (STATES - 1) / devices)  # no gradients while it generates


def _holds_whole(config: RunConfig) -> bool:
    inner = config.inner
    return inner.loop != "supervised" and (inner.sdpo.is_used or inner.replay.is_used or inner.process is not None)


def recorded_bytes(config: RunConfig, replicas: int) -> int:
    """Return how many bytes of tokens, masks and log-probs one outer step records at most (fleet.record_rollouts)."""
    inner = config.inner
    if not config.fleet.record_rollouts or inner.loop == "supervised":
        return 0
    rollouts = replicas * (config.outer.interval // inner.boundary) * inner.generation_size
    return TOKEN * rollouts * inner.completion_length


def delta_bytes(parameters: int, codec: str) -> int:
    """Return one pseudogradient's bytes; for codecs of fixed size, exact up to a block's padding."""
    return ceil(4 * parameters / nominal_ratio(codec))


def step_bytes(parameters: int, replicas: int, codec: str, fragments: int = 1) -> int:
    """Return the bytes of one outer step in the bucket, if all replicas take part: pseudogradients and mean."""
    left = step_sizes(parameters, replicas, codec, fragments)
    return left.deltas + left.mean


def step_sizes(parameters: int, replicas: int, codec: str, fragments: int = 1) -> Sizes:
    part = ceil(parameters / fragments)
    return Sizes(replicas * delta_bytes(part, codec), mean_bytes(part, replicas, codec))


def mean_bytes(part: int, replicas: int, codec: str) -> int:
    """Return the bytes of one step's mean of `part` elements, as rendezvous/means/reduce.py writes it."""
    body = delta_bytes(part, codec)
    if reduces_sharded([body] * replicas, codec, Rules().shard_from):
        return body
    return 4 * part if 2 * 4 * part <= replicas * body else 0


def snapshot_bytes(parameters: int) -> int:
    """Return the bytes of θ and outer momentum, in fp32."""
    return 8 * parameters


def lines(found: Footprint, steps: int, keep: int | None = None) -> list[str]:
    """Return the footprint as text.   keep: bytes that stay in the bucket (fleet.keep); None: all."""
    f = found
    link = f"{LINK * 8 / 1e9:g} Gbit/s"
    kept = f"{byte_size(f.in_all)} after {steps} steps"
    if keep is not None and keep < f.in_all:
        kept = kept_text(f, steps, keep)
    recorded = f"; and up to {byte_size(f.rollouts)} of recorded tokens per step, with their text" if f.rollouts else ""
    on = "the device" if f.devices == 1 else f"each of {f.devices} devices"
    loads = f.devices > 1 and f.loading > f.host
    host = f"{byte_size(f.host)} of host memory"
    host += f", and {byte_size(f.loading)} while its {f.devices} processes load the model" if loads else ""
    return [
        f"memory per replica: {byte_size(f.device)} on {on} (weights, gradients, Adam; activations and "
        f"generation come on top), {host} ({f.parameters / 1e6:,.1f} M parameters)",
        f"bucket: {byte_size(f.each_step)} per outer step ({f.codec}), {byte_size(f.each_snapshot)} per snapshot; "
        f"{kept}{recorded}",
        f"a sync takes about {duration(f.sync_s)} at an assumed {link} up and down, every {duration(f.compute_s)} "
        "(a guess, for a GPU); `diloco doctor URL` measures the link",
    ]


def kept_text(found: Footprint, steps: int, keep: int) -> str:
    """Return the text about the blobs that stay if fleet.keep is smaller than the run, and about the snapshots."""
    of_all = f"of {byte_size(found.in_all)} in {steps} steps"
    every = f"with a snapshot {f'every {found.period} steps' if found.period > 1 else 'at every step'}"
    if keep >= found.needed:
        reach = f"reach back {(keep - found.needed) // found.back:,} steps or more"
        return f"at most {byte_size(keep)} {of_all} stay (fleet.keep), {every}, and {reach}"
    stays = f"the blobs that a replica may need, up to {byte_size(found.needed)}, {of_all} stay (fleet.keep), {every}"
    return f"{stays}{_floor_advice(found, keep)}" if keep else stays


def _floor_advice(found: Footprint, keep: int) -> str:
    """Return the next thing to do if fleet.keep is below the floor."""
    room = f'fleet.keep = "{byte_size(_rounded_up(found.floor))}" is the least that has room for it'
    if found.int8_floor >= found.floor:
        return f"; {room}"
    enough = "which fits" if found.int8_floor <= keep else "which is still more"
    return f'; {room}, and outer.codec = "int8" makes that {byte_size(found.int8_floor)}, {enough}'


def _rounded_up(size: int) -> int:
    """Round up to three digits, as `byte_size` writes them, so that the size in the text is enough."""
    unit = 10 ** max(0, len(str(size)) - 3)
    return -(-size // unit) * unit

"""A commit whose mean is zero is not a round: θ, momentum and the memory of "auto" stay, bit by bit, in every replica.

    rounds    x₁  0  x₂  0  0  x₃        the invariant:  the same θ, m, ρ̂ as   x₁  x₂  x₃

Decided from the mean's bytes alone, so it is the same live, sharded, under every codec, in a replay, in an export and
over a lighthouse.

Not promised: anything for a bare Manager, whose outer optimizer is its user's.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from diloco import OuterConfig, make_diloco
from diloco.model.export import state_at
from diloco.outer.managers.manager import MockManager
from diloco.outer.optimizer import Nesterov, OuterState
from diloco.outer.safety import is_zero
from diloco.run.config import CODECS
from diloco.runlog.reader import read_report
from diloco.runlog.summary import summary
from executors.cli.looking.status import status_table
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.clock import SystemClock
from rendezvous.codecs import DENSE
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.records.records import Commit, Snapshot
from rendezvous.stores.memory import MemoryStore
from tests.diloco.test_lighthouse import Replica, held, lighthouse, theta_after, together  # noqa: F401
from tests.diloco.test_outer_safety import warned
from tests.support.audit import check_run
from tests.support.fleet import Fleet

RNG = np.random.default_rng(23)
NEGATIVE = np.float32(-0.0)


def vector(n: int) -> np.ndarray:
    return RNG.standard_normal(n, dtype=np.float32)


def state_of(*sizes: int, lr: float | str = 0.7, mu: float = 0.9, full: bool = False) -> OuterState:
    """full: with a history, as in the middle of a run."""
    flats = [nn.Parameter(torch.zeros(n)) for n in sizes]
    state = OuterState([p.data for p in flats], [Nesterov(p, lr=lr, momentum=mu) for p in flats])
    if full:
        rng = np.random.default_rng(1)
        for array in state.all_arrays().values():
            array[:] = rng.uniform(0.25, 0.75, array.shape)
    return state


# ---------------------------------------------------------------- what is zero


@pytest.mark.parametrize("n", [0, 1, 16383, 16384, 16385, 50_000])
def test_only_zeros_are_zero(n: int) -> None:
    mean = np.zeros(n, np.float32)
    assert is_zero(mean)
    mean[::2] = NEGATIVE
    assert is_zero(mean)
    for at in {0, n // 2, n - 1} if n else ():
        for value in (1.0, -1e-38, 1e-45, -1e-45, np.nan, np.inf):  # 1e-45: the least that fp32 has
            one = mean.copy()
            one[at] = value
            assert not is_zero(one), (at, value)


def test_what_is_zero_does_not_hang_on_how_the_cpu_treats_subnormals() -> None:
    least = np.full(4, 1e-45, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot")
    try:
        assert not is_zero(least)
    finally:
        torch.set_flush_denormal(False)


def test_a_look_at_a_mean_that_is_not_zero_ends_at_its_first_piece() -> None:
    """Bytes that are read, not seconds: the rest of the mean is not even there."""

    class Mean(np.ndarray):
        read = 0

        def __getitem__(self, item: Any) -> Any:
            piece = super().__getitem__(item)
            Mean.read += piece.nbytes
            return piece

    assert not is_zero(np.ones(1_000_000, np.float32).view(Mean))
    assert Mean.read == 4 << 14


# ---------------------------------------------------------------- the invariant


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["x", "0", "-0"]), max_size=24), st.sampled_from([0.7, "auto"]), st.integers(1, 2))
def test_a_run_with_empty_rounds_has_the_bits_of_one_without(rounds: list[str], lr: Any, fragments: int) -> None:
    sizes = (300, 7)[:fragments]
    holed, dense = state_of(*sizes, lr=lr), state_of(*sizes, lr=lr)
    for t, kind in enumerate(rounds):
        f = t % fragments
        mean, before = vector(sizes[f]), holed.digest()
        if kind == "x":
            holed.apply(f, mean.copy())
            dense.apply(f, mean.copy())
        else:
            holed.apply(f, np.full(sizes[f], 0.0 if kind == "0" else NEGATIVE))
            assert holed.digest() == before and holed.optimizers[f].stood
    assert holed.digest() == dense.digest()


# ---------------------------------------------------------------- the engine


def lives(store: MemoryStore, rules: Rules, states: list[OuterState]) -> list[Rendezvous]:
    write_control(store, SystemClock(), replicas=len(states), min_replicas=len(states), steps=4)
    found = [Rendezvous(store, SystemClock(), f"r{i:02d}", rules, Timing(poll=0.002)) for i in range(len(states))]
    for rv, state in zip(found, states, strict=True):
        rv.claim()
        rv.join(state)
    return found


def outer_step(rvs: list[Rendezvous], states: list[OuterState], deltas: list[np.ndarray]) -> None:
    def one(rv: Rendezvous, state: OuterState, delta: np.ndarray) -> None:
        theta = state.thetas[rv.fragment].numpy()
        rv.offer(delta.copy(), 1, theta=theta)
        commit, out = rv.settle(), np.empty_like(delta)
        rv.mean(commit, out)
        state.apply(commit.t % rv.rules.fragments, out)
        rv.advance(commit)

    with ThreadPoolExecutor(len(rvs)) as pool:
        for done in [pool.submit(one, *each) for each in zip(rvs, states, deltas, strict=True)]:
            done.result(60)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_and_both_ways_of_reducing_leave_theta_where_it_is(codec: str, sharded: bool) -> None:
    """In the middle of a run: there is a history.  Zeros, −0.0 and +x −x; then a replica joins, and goes on."""
    n, store = 5000, MemoryStore()
    rules = Rules(
        codec=codec, snapshot_every=2, norm_gate=0.0, shard_from=1 if sharded else 1 << 40, shard_elements=1024
    )
    states = [state_of(n, full=True) for _ in range(3)]
    before = states[0].digest()
    rvs = lives(store, rules, states)
    for deltas in ([np.zeros(n, np.float32)] * 3, [np.full(n, NEGATIVE)] * 3, [np.zeros(n, np.float32)] * 3):
        outer_step(rvs, states, deltas)
        assert {s.digest() for s in states} == {before}
    commits = [Commit.decode(store.get(layout.commit_key(t)) or b"") for t in range(3)]
    assert {c.base for c in commits} == {before}, "consecutive bases are equal"
    assert {c.mode for c in commits} == {"sharded" if sharded and codec in DENSE else "direct"}
    two = Snapshot.decode(store.get(layout.snapshot_key(2)) or b"")
    assert two.base == before and two.confirmed
    outer_step(rvs, states, [vector(n)] * 3)
    assert len({s.digest() for s in states}) == 1 and states[0].digest() != before
    for i, rv in enumerate(rvs):
        rv.finish("done")
        assert (store.get(layout.snapshot_key(4)) is not None) == (i > 0), "confirmed by two that left with one θ"
    late, whole = state_of(n), state_of(n)
    again = Rendezvous(store, SystemClock(), "r00", rules, Timing())
    again.claim()
    again.join(late)
    assert again.step == 4 and late.digest() == states[0].digest()
    for key in store.list("snapshots/"):
        if not key.startswith("snapshots/0000000000"):
            store.delete([key])
    replayer = Rendezvous(store, SystemClock(), "r01", rules, Timing())
    replayer.claim()
    replayer.join(whole)
    assert replayer.step == 4 and whole.digest() == states[0].digest(), "from step 0, mean by mean"


def test_pseudogradients_that_cancel_are_an_empty_round_too() -> None:
    n, store = 100, MemoryStore()
    states = [state_of(n, full=True) for _ in range(2)]
    before, x = states[0].digest(), vector(n)
    outer_step(lives(store, Rules(), states), states, [x, -x])
    assert {s.digest() for s in states} == {before}


# ---------------------------------------------------------------- whole runs


def gradients_in(rounds: str, lr: float | str) -> tuple[torch.Tensor, list[dict[str, Any]], str]:
    """One replica, H = 2, whose gradient is 0 in rounds "0"; -> θ, its "step" events, what was warned."""
    torch.manual_seed(0)
    model, manager = nn.Linear(6, 1, bias=False), MockManager(f"empty-{rounds}-{lr}", replicas=1)
    told: list[dict[str, Any]] = []
    manager.session.emit = lambda event, **fields: told.append({"event": event, **fields})
    optimizer, number = torch.optim.SGD(model.parameters(), lr=0.1), 0
    config = OuterConfig(sync_every=2, lr=lr, momentum=0.9, snapshot_every=2)
    with make_diloco(model, optimizer, manager, config) as loop:
        for kind in rounds:
            number += kind == "x"
            for inner in range(2):
                generator = torch.Generator().manual_seed(10 * number + inner)
                step = torch.randn(1, 6, generator=generator)
                model.weight.grad = step if kind == "x" else torch.zeros(1, 6)
                optimizer.step()
    manager.shutdown()
    steps = [e for e in told if e["event"] == "step"]
    warnings = " ".join(e["text"] for e in told if e.get("kind") == "empty_round")
    return loop.thetas[0].clone(), steps, warnings


@pytest.mark.parametrize("lr", [0.7, "auto"])
def test_a_loop_with_empty_rounds_ends_where_one_without_ends_and_says_so(lr: Any) -> None:
    (holed, steps, said), (dense, others, nothing) = gradients_in("xx0x00x", lr), gradients_in("xxxx", lr)
    assert torch.equal(holed, dense) and holed.any()
    assert [e["step"] for e in steps if e.get("empty")] == [2, 4, 5] and not any("empty" in e for e in others)
    assert "outer step 2: the mean was zero, so θ and the outer momentum stay as they are" in said and nothing == ""
    assert steps[2]["theta"] == steps[1]["theta"] != steps[3]["theta"]


@pytest.mark.parametrize("lr", [0.7, "auto"])
def test_over_a_lighthouse_an_empty_round_moves_nothing(lighthouse: str, lr: Any) -> None:  # noqa: F811
    a, b = (Replica(lighthouse, f"r0{i}", 1.0, lr=lr) for i in range(2))
    digests: dict[Replica, list[str]] = {a: [], b: []}

    def step(replica: Replica) -> None:
        at = replica.manager.current_step()
        replica.moves = 0.0 if at in (1, 2) else 1.0

    loops = together(lambda: a.train([4], step), lambda: b.train([4], step))
    if lr == 0.7:
        assert torch.equal(held(loops[0]), theta_after([4.0, 4.0])), "as after two rounds"
    assert loops[0].state.digest() == loops[1].state.digest()
    for replica in digests:
        replica.end()


@pytest.mark.quick(1)
@pytest.mark.parametrize("outer", [{}, {"lr": "auto", "fragments": 2, "sync_every": 8}], ids=["fixed", "auto, F = 2"])
def test_a_fleet_stands_through_empty_rounds_and_its_replay_and_export_agree(
    tmp_path: Path, outer: dict[str, Any]
) -> None:
    """Real processes, one of them killed with its offer for an empty round durable; means of 0 and −0.

    Nothing is carried: late work of an earlier step would make an empty mean another one, on a slow machine.
    """
    empty = [3, 4, 7]
    fleet = Fleet(
        tmp_path, outer={"momentum": 0.9, "snapshot_every": 2, "max_carry": 0, **outer},
        fleet={"steps": 8, "replicas": 3, "min_replicas": 3},
        environ={"TEST_EMPTY": ",".join(map(str, empty))},
    )  # fmt: skip
    fleet.start("r00")
    fleet.start("r01", die="after:create:/offer/@4")
    fleet.start("r02")
    fleet.wait_for(lambda: not fleet.sessions["r01"][0].is_alive())
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0], "r02": [0]}, fleet.logs()
    found = check_run(tmp_path / "run", 8)
    assert found.empty == empty
    same = [t for t in range(8) if found.digests[t] == found.digests[t + 1]]
    assert same == empty and len(set(found.digests)) == 9 - len(empty)
    for t in (4, 5, 8):
        assert state_at(fleet.run, fleet.model, t)[1].digest() == found.digests[t]
    report = read_report(fleet.store)
    assert "mean was zero, θ stayed: 3 of 8 outer steps (3, 4, 7)" in summary(report)
    assert any("outer step 7: mean was zero, θ stays" in line for line in status_table(report))
    assert {e["step"] for e in warned(fleet, "empty_round")} >= {3, 7}

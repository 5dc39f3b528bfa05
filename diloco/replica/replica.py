"""One replica: a process whose only inputs are a run's URL and a slot.

    python -m diloco.replica RUN_URL --slot r00

    claim, beat ─▶ imports ─▶ θ₀, files ─▶ inner loop ─▶ heal ─▶ train … sync … train … sync ─▶ leave
    SIGTERM / SIGINT / SIGHUP: offer the inner steps done so far, leave.   kill -9: the run continues without it.

The exit code shows why the process ended (diloco/process/exitcodes.py).  Not promised: several devices (ranks.py).
"""

import faulthandler
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from diloco.model.fetch import fetch_files, fetch_model
from diloco.process import exitcodes
from diloco.process.disk import Scratch, retry_when_full
from diloco.process.output import survive_lost_output
from diloco.process.processes import is_named_alive
from diloco.process.session import Session, SessionHost
from diloco.process.signals import hear_asking
from diloco.run.config import BUCKET, ConfigError, RunConfig, derive_seed
from diloco.run.founding import refuse_layout
from diloco.run.record import ModelRecord, Run, read_run
from diloco.run.sections import keep_bytes
from diloco.runlog.learning import step_line
from inner import InnerError, Seeds
from inner.errors import RewardFailed
from rendezvous import layout
from rendezvous.agreement.membership import BeatStatus, read_control
from rendezvous.background import together_on
from rendezvous.clock import Clock, SystemClock
from rendezvous.codecs import why_no_kernels
from rendezvous.errors import (
    Fenced,
    Forged,
    GaveUp,
    Leaving,
    RendezvousError,
    StoreError,
    StoreUnclear,
    WrongRun,
)
from rendezvous.layout import slot_index
from rendezvous.records.records import WireError
from rendezvous.snapshots import record as snapshots
from rendezvous.stores.run_key import as_sealed

if TYPE_CHECKING:
    from diloco.outer.loop import OuterLoop
    from diloco.outer.managers.lighthouse import LighthouseManager
    from diloco.outer.managers.manager import StoreManager
    from diloco.replica.evaluation import Evaluator, Scorer
    from inner import InnerLoop
    from inner.data.order import Share

SLOW_CODEC = (
    "the compiled kernels of the codecs are missing ({why}): packing, means and sums take about three times as long, "
    "with the same bits. Remove the cause; a C compiler is in gcc and libc6-dev"
)
Parts = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]  # build_loop, manager_of, evaluator_of
ZEROS = "zeros"  # the folder of a start model without its weights
OPEN_S = 60.0  # limit for the first answer of the store
LOOP_FOLDER = "inner"  # in a replica's scratch folder: files of the inner loop's libraries
REJOIN_WARMUP = 3  # inner steps of lr warm-up for a session that starts with an empty Adam in the middle of a run


def run_member(
    url: str, slot: str, act: "Callable[[Run, Session], int]", *, parent: str = "", generation: int = 0, ranks: int = 0
) -> int:
    """Claim a slot, or an actor's name, and act in that session.   Return the exit code.

    parent: "PID:START"; this process ends with that process.   generation: claimed already, or 0.   ranks: 0: one."""
    survive_lost_output()
    faulthandler.enable(2)  # a crash of native code shows its calls
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # for scripts (inner/train/grpo.py says why)
    try:
        alive = lambda: not parent or is_named_alive(parent)  # noqa: E731
        return _run_session(url, slot, act, parent_alive=alive, generation=generation, ranks=ranks)
    except (ConfigError, InnerError, WrongRun, WireError, Forged) as error:
        return _print_end(slot, error, exitcodes.USER_ERROR)
    except (StoreError, GaveUp) as error:
        return _print_end(slot, error, exitcodes.GAVE_UP)


def _run_session(url: str, slot: str, act: "Callable[[Run, Session], int]", **of_session: Any) -> int:
    run = open_patiently(url, SystemClock())
    with suppress(StoreError):  # without an answer, continue: the session below retries
        if (end := too_late(run, SystemClock())) is not None:
            return _print_end(slot, end[1], end[0])
    try:
        session = Session(
            run.store, slot, run.timing, keep=keep_bytes(run.config.fleet.keep), **of_session,
            hung_after_s=run.config.hung_after_s, broadcasts=run.config.fleet.broadcast_weights,
        )  # fmt: skip
    except Fenced as error:
        return _print_end(slot, error, exitcodes.FENCED)
    session.on_event = lambda event, fields: _print_step(session, event, fields)
    hear_asking(lambda: session.ask_to_leave("got a signal to end"))
    try:
        return act(replace(run, store=session.rv.store), session)  # this store retries
    except RendezvousError as error:
        from diloco.replica.exits import end_session

        return _print_end(slot, error, end_session(session, error))
    except BaseException as error:
        from diloco.replica.exits import as_error
        from diloco.replica.out_of_memory import error_words  # it imports torch

        error = as_error(error)
        session.emit("crashed", error=error_words(error))
        session.flush()
        if isinstance(error, RewardFailed):
            return _print_end(slot, error, exitcodes.NO_REWARD)
        if isinstance(error, InnerError) and not _is_preflight(session):
            return _print_end(slot, error, exitcodes.CRASHED)
        raise error


def open_patiently(url: str, clock: Clock, patience_s: float = OPEN_S) -> Run:
    """Return the run.  Retry if the store does not answer: the exit code would be GAVE_UP, which ends the whole run.

    After this call, the session's store retries by itself."""
    until, told = clock.now() + patience_s, False
    while True:
        try:
            return read_run(url)
        except StoreUnclear as error:
            if clock.now() >= until:
                raise
            if not told:
                told = not print(f"{error}; trying again for {patience_s:.0f} s", file=sys.stderr, flush=True)
        clock.sleep(1.0)


def _is_preflight(session: Session) -> bool:
    """Whether an error may concern all replicas: no outer step is committed, and this session has not begun to train.

    A later error counts as temporary, or as a fault of this machine, and ends only this session (decision 025)."""
    return session.rv.members.status.phase == "boot" and session.rv.store.get(layout.commit_key(0)) is None


def too_late(run: Run, clock: Clock) -> tuple[int, str] | None:
    """Return (exit code, why) if a replica that starts now has nothing left to do. Call it before the claim.
    A queue may start a machine late. At this point, no large import or download has happened."""
    sealed = as_sealed(run.store)
    store = run.store if sealed is None else sealed.without_warnings()  # the journal warns
    desired = read_control(store)
    if desired.steps and store.get(layout.commit_key(desired.steps - 1)) is not None:
        return exitcodes.DONE, f"all {desired.steps} outer steps are committed; nothing to do"
    if desired.stop:
        return exitcodes.LEFT, "the run was stopped before this replica began; `diloco resume` continues it"
    if 0 < desired.until <= clock.wall():
        return exitcodes.LEFT, "the run has no supervisor any more (its lease is over); `diloco resume` continues it"
    return None


def train_or_run_script(run: Run, session: Session) -> int:
    return (train_session if run.config.script is None else script_session)(run, session)


def train_session(run: Run, session: Session, parts: Parts | None = None) -> int:
    """Fetch the inputs and train.   parts: other functions for three steps, for a replica of several ranks."""
    record = wait_for_model(run, session)
    stay = lambda: leave_now(session)  # noqa: E731
    with retry_when_full(session, "temporary files", Scratch, stay) as scratch:
        fetch = lambda: _fetch_inputs(run, record, scratch, session)  # noqa: E731
        model_dir, files = retry_when_full(session, "the start model", fetch, stay)
        session.rv.members.status.note = ""
        stay()
        return _train_model(run, session, record, Inputs(model_dir, files, scratch / LOOP_FOLDER), parts)


def script_session(run: Run, session: Session, tell: Any = None, end: Callable[[int], int] = int) -> int:
    """Run the script.   tell: see `run_script`.   end: called with the exit code, before the folder goes."""
    from diloco.script.process import run_script

    leave_now(session)
    with retry_when_full(session, "temporary files", Scratch, lambda: leave_now(session)) as scratch:
        return end(run_script(run, session, scratch, tell))


def _fetch_inputs(run: Run, record: ModelRecord, scratch: Path, session: Session) -> tuple[Path, dict[str, Path]]:
    """Return θ₀'s folder (without weights if a snapshot replaces them) and the user's files. Also make the loop's
    folder, because the caller retries when the disk is full."""
    (scratch / LOOP_FOLDER).mkdir(exist_ok=True)
    files = fetch_files(run, scratch / "code")
    fetch, folder = fetch_model, "model"
    if _heals_without_start(run, record):
        from diloco.model.zeros import fetch_model_without_weights as fetch

        folder = ZEROS
    return _ask_patiently(record, session, lambda: fetch(run.store, record, scratch / folder)), files


def _ask_patiently(record: ModelRecord, session: Session, fetch: Callable[[], Path]) -> Path:
    """Call `fetch`. Repeat the call if the start model is on the Hub; the bucket's store retries by itself."""
    if (model := record.hub_model) is None:
        return fetch()
    from diloco.model.hub_wait import from_hub

    return from_hub(session, model, fetch, lambda: leave_now(session))


def fetch_weights(run: Run, session: Session, record: ModelRecord, folder: Path) -> Path:
    """Fetch the whole start model if `folder` lacks the weights; else return `folder`."""
    if folder.name != ZEROS:
        return folder
    return _ask_patiently(record, session, lambda: fetch_model(run.store, record, folder.with_name("model")))


@dataclass(frozen=True)
class Inputs:
    """Paths on this machine's disk.   model_dir: θ₀'s folder.   files: the user's files.   scratch: a folder."""

    model_dir: Path
    files: dict[str, Path]
    scratch: Path


def _heals_without_start(run: Run, record: ModelRecord) -> bool:
    """Whether a replica that starts now does not need θ₀, because it loads the newest snapshot.

    If that snapshot fails, the replica uses snapshot 0, which is in the bucket, too; for a model on the Hub, it then
    fetches the weights.   An adapter always needs θ₀'s files.
    """
    if run.config.rendezvous != BUCKET or run.config.inner.compares_with_start or run.config.inner.lora is not None:
        return False
    if any(name.startswith("adapter_") for name in record.files):
        return False
    first = snapshots.read(run.store, 0)
    newest = next(snapshots.newest_first(run.store), None)
    at_hand = first is not None and (bool(first.blob) or bool(record.hub))
    return at_hand and newest is not None and newest.t > 0


def _train_model(run: Run, session: Session, record: ModelRecord, inputs: Inputs, parts: Parts | None) -> int:
    import torch  # slow imports only now: the slot is claimed, and heartbeats are written

    from diloco import make_diloco
    from diloco.model.start_model import first_arrays
    from inner.models.precision import lost_updates

    if os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(1)
    config = run.config
    build, manage, judge = parts or (build_loop, manager_of, evaluator_of)
    before = run.record.parent
    seeds = seeds_of(run, session.rv.slot, session.rv.generation)
    loop, model_dir = build(run, session, record, inputs, seeds)
    _refuse_other_start(record, loop.model, with_weights=model_dir.name != ZEROS)
    whole = lambda: fetch_weights(run, session, record, model_dir)  # noqa: E731
    again = lambda: first_arrays(whole(), config.inner.dtype, config.outer, config.inner.lora)  # noqa: E731
    manager = manage(config, session, again if record.hub else None)
    manager.rounds.stats = lambda: _round_stats(loop, session, config.fleet.log_rollouts)
    loop.report_to(SessionHost(session, run.record.nonce, run.config.inner.sampling.box_usd_per_hour))
    tell_of_rollouts = lambda: None  # noqa: E731
    if config.fleet.record_rollouts:
        from diloco.replica.rollouts import keep_rollouts

        tell_of_rollouts = keep_rollouts(run, session, loop)
    if why := why_no_kernels():
        session.emit("warning", kind="kernels", text=SLOW_CODEC.format(why=why))
    with make_diloco(loop.model, loop.optimizer, manager, config.outer, boundary=loop.boundary) as outer:
        if text := lost_updates(loop.model.named_parameters(), config.inner.learning_rate):
            session.emit("warning", kind="bf16", text=text)
        averaged = lambda: manager.num_participants() or session.rv.wanted.replicas  # noqa: E731
        progress = lambda: outer.progress(before.outer_steps, config.fleet.steps)  # noqa: E731
        loop.follow(lambda: before.outer_steps + outer.committed(), outer.theta, averaged, progress)
        start = data_position(run, outer.committed(), slot=session.rv.slot, generation=session.rv.generation)
        _go_on_in_data(run, session, loop, replace(seeds, start=start))
        evaluator = judge(run, session, loop, inputs, outer)
        try:
            _run_inner(loop, manager, session.rv.members.status, evaluator, outer)
        finally:
            tell_of_rollouts()  # the log is written for the last time when the session leaves
    if record.base:
        from diloco.outer.frozen import refuse_changed_base

        refuse_changed_base(record.base, loop.model)
    return exitcodes.LEFT if manager.left else exitcodes.DONE


def _refuse_other_start(record: ModelRecord, model: Any, *, with_weights: bool) -> None:
    """Raise WrongRun if this replica's start model differs from the run's.   with_weights: False if θ₀ is zeros."""
    from diloco.model.start_model import refuse_other_bits
    from diloco.outer.flat import layout_of

    refuse_layout(record.layout, layout_of(model))
    if with_weights:
        refuse_other_bits(record.theta, model)
    if record.base:
        from diloco.outer.frozen import refuse_other_base

        refuse_other_base(record.base, model)


def manager_of(
    config: RunConfig, session: Session, theta_0: "Callable[[], Mapping[str, Any]] | None"
) -> "StoreManager | LighthouseManager":
    if config.rendezvous == BUCKET:
        from diloco.outer.managers.manager import StoreManager

        return StoreManager(session, theta_0=cast("Any", theta_0))
    from diloco.outer.managers.lighthouse import connect_lighthouse

    return connect_lighthouse(config.rendezvous, session)


def build_loop(
    run: Run, session: Session, record: ModelRecord, inputs: Inputs, seeds: Seeds
) -> "tuple[InnerLoop, Path]":
    """Return the inner loop and its model's folder, with weights if the snapshots lack some."""
    from diloco.model.start_model import has_more_than_trained
    from inner import build_inner
    from inner.models.precision import PrecisionWarning

    def build(folder: Path) -> "InnerLoop":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)  # the journal prints this warning, too
            return build_inner(run.config.inner, folder, inputs.files, seeds, REJOIN_WARMUP, scratch=inputs.scratch)

    model_dir = inputs.model_dir
    loop = build(model_dir)
    if model_dir.name == ZEROS and has_more_than_trained(loop.model):
        model_dir = fetch_weights(run, session, record, model_dir)
        loop = build(model_dir)
    return loop, model_dir


def _run_inner(
    loop: "InnerLoop",
    manager: "StoreManager | LighthouseManager",
    status: BeatStatus,
    evaluator: "Evaluator | None",
    outer: "OuterLoop",
) -> None:
    def evaluate_if_due() -> None:
        if evaluator is not None and evaluator.is_due():
            with outer.aside():
                evaluator.evaluate()

    def stop() -> bool:
        status.data += 1
        evaluate_if_due()  # right after the outer step, also after the last one
        return manager.done

    evaluate_if_due()
    if not manager.done:
        loop.train(stop)


def evaluator_of(
    run: Run, session: Session, loop: "InnerLoop", inputs: Inputs, outer: "OuterLoop", *, ranks: int = 1
) -> "Evaluator | None":
    """Make the evaluator. Return None if the config has no [eval].   ranks: this replica's number of ranks."""
    config = run.config.eval
    if config is None:
        return None
    from diloco.replica.evaluation import Evaluator
    from inner.data.prompts import load_prompts
    from inner.settings.task import EVAL

    rows = load_prompts(config.source, inputs.files, run.config.inner.data, kind=EVAL)
    must_go = lambda: session.rv.is_leaving or outer.rounds.fenced  # noqa: E731
    return Evaluator(
        config, rows, cast("Scorer", loop), session, batch=ranks * run.config.inner.generation_size,
        seed=run.config.seed, stands_at=outer.committed, must_go=must_go,
    )  # fmt: skip


def seeds_of(run: Run, slot: str, generation: int) -> Seeds:
    """Return the seeds: the order's by run and slot, the noise's by session, or by slot for shared rollouts."""
    number, seed = generation, run.config.seed
    if generation > 1 and run.config.fleet.record_rollouts:
        from diloco.process.data_position import is_unlucky

        number = generation if is_unlucky(run.store, slot, generation) else 1
    return Seeds(derive_seed(seed, slot), derive_seed(seed, slot, number), share=share_of(run.config, slot))


def data_position(run: Run, step: int, *, slot: str, generation: int) -> int:
    """Return the inner step from which this session, at outer step `step`, reads its slot's data."""
    config, before = run.config, run.record.parent.inner_steps
    if config.rendezvous != BUCKET:  # there are no commits to count by
        return before + step * config.outer.interval
    if generation == 1:
        return before
    from diloco.process.data_position import counted_inner_steps, read_offers

    offers = read_offers(run.store, step, together_on(run.store))
    return before + counted_inner_steps(offers.get(slot, ()), config.outer)


def _go_on_in_data(run: Run, session: Session, loop: "InnerLoop", seeds: Seeds) -> None:
    """Begin at the generation batch that contains the position. Log the share and the first inner step.

    Windows of a text have no share, because they are drawn from the whole text."""
    start = seeds.start // loop.boundary * loop.boundary
    loop.start_at(start)
    session.rv.members.status.data = start
    if run.config.inner.loop != "supervised" and (share := seeds.share) is not None:
        session.emit("data", share=share.index, of=share.of, seed=share.seed, inner_step=start)


def share_of(config: RunConfig, slot: str) -> "Share":
    """Return the slot's share of the rows.  The run's first slots divide all rows among them.  Slots that were added
    later divide all rows again, in another order."""
    from inner.data.order import Share

    deal, index = divmod(slot_index(slot), config.fleet.replicas)
    return Share(derive_seed(config.seed, "prompts", deal), index, config.fleet.replicas)


def wait_for_model(run: Run, session: Session) -> ModelRecord:
    """Wait for θ₀'s manifest, which the launcher publishes while replicas start.   Raises GaveUp."""
    began = session.clock.now()
    while (body := run.store.get(layout.MODEL_MANIFEST)) is None:
        leave_now(session)
        session.rv.members.status.note = "waits for the model"
        if session.clock.now() - began > session.timing.give_up:
            raise GaveUp(f"no model was published within {session.timing.give_up:.0f} s; look at the launcher's log")
        session.clock.sleep(session.timing.poll * 4)
    return ModelRecord.decode(body)


def leave_now(session: Session) -> None:
    if session.rv.is_leaving:
        raise Leaving("asked to leave before the first inner step; nothing was lost")
    if session.rv.members.fenced_by > session.rv.generation:
        raise Fenced(f"{session.rv.slot} now belongs to generation {session.rv.members.fenced_by}; this process ends")


def _print_end(slot: str, error: Exception | str, code: int) -> int:
    print(f"{slot}: {error}", file=sys.stderr, flush=True)
    return code


def _print_step(session: Session, event: str, fields: dict[str, Any]) -> None:
    """Print a line per outer step, so that a reader of the output sees progress."""
    if event == "step":
        print(step_line(session.rv.name, fields, session.rv.wanted.steps), flush=True)


def _round_stats(loop: "InnerLoop", session: Session, rollouts: int) -> dict[str, float]:
    session.add_sample(loop.sample(rollouts) if rollouts else {})
    return {k: float(v) for k, v in loop.pop_metrics().items() if math.isfinite(v)}

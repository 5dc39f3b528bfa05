"""`diloco gc`: what a run needs no more goes, by the rules of its collectors; readers know; what is needed stays."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.audit.verify import verify
from diloco.model import give_back
from diloco.model.export import model_record, state_at, what_is_kept
from diloco.model.give_back import collect, plan_gc, plan_lines
from diloco.run.config import ConfigError
from diloco.run.record import Run, read_run
from diloco.runlog.reader import read_report
from diloco.runlog.summary import kept_words
from executors.cli.main import main
from rendezvous import layout
from rendezvous.agreement.membership import read_control, write_control
from rendezvous.clock import SystemClock
from rendezvous.errors import ChainBroken, StoreFull
from rendezvous.records.records import Leave
from rendezvous.records.rollouts import Rollouts, seal_bundle
from rendezvous.stores.open import open_store
from tests.support.puppets import PuppetRun

CLOCK = SystemClock()


def played(folder: Path, steps: int = 12, **fleet: object) -> PuppetRun:
    run = PuppetRun(folder, fleet={"keep": "all", **fleet})
    run.rounds(steps)
    return run


def ended(run: PuppetRun) -> Run:
    """As `diloco stop` leaves it."""
    found = read_run(run.url)
    write_control(found.store, CLOCK, stop=True)
    return found


def blobs(run: PuppetRun) -> list[Path]:
    return sorted(p for p in run.folder.rglob("*") if p.suffix in (".bin", ".safetensors") and "steps" in str(p))


def test_a_dry_run_deletes_nothing_and_says_what_would_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = played(tmp_path)
    ended(run)
    before = {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()}
    assert main(["gc", run.url, "--keep", "window", "--dry-run", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["done"] and told["objects"] == len(told["keys"]) > 20 and told["unnamed"] == 0
    assert sum(told["freed"].values()) == sum((run.folder / key).stat().st_size for key in told["keys"])
    assert told["lines"][-1] == "nothing was deleted" and "afterwards it reaches back to step" in told["lines"][1]
    assert {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()} == before


def test_a_false_record_of_a_later_step_is_named_and_may_be_deleted(tmp_path: Path) -> None:
    """A forged leave record blocked gc, and the error asked for a backup alone."""
    found = ended(played(tmp_path))
    forged = Leave(slot="r07", generation=1, step=10**6, base="", reason="", nonce="n", at=0.0)
    found.store.put(layout.leave_key("r07", 1), forged.encode())
    with pytest.raises(
        ChainBroken, match=r"leave/r07-1\.json shows step 1000000 .* delete it if no replica of this run"
    ):
        plan_gc(found, "window", CLOCK)
    found.store.delete([layout.leave_key("r07", 1)])
    assert plan_gc(found, "window", CLOCK).keys


def test_what_is_left_is_as_it_was_and_readers_know_what_is_not(tmp_path: Path) -> None:
    run = played(tmp_path)
    found = ended(run)
    record = model_record(found)
    newest = state_at(found, record, 12)[1].digest()
    plan = plan_gc(found, "window", CLOCK)
    collect(found, plan, CLOCK)
    assert not [key for key in plan.keys if (run.folder / key).exists()]
    assert read_control(found.store).keep == "window"
    kept = what_is_kept(found)
    assert kept == plan.after and plan.lost and kept is not None and kept.covers_step(12)
    assert state_at(found, record, 12)[1].digest() == newest
    with pytest.raises(ConfigError, match=r"θ_3 cannot be computed any more: what is kept \(fleet.keep = window\)"):
        state_at(found, record, 3)
    verdict = verify(found)
    assert verdict.good and any("is gone (collected, fleet.keep)" in text for text in verdict.unchecked)
    assert kept_words(read_report(open_store(run.url))) == [
        "`diloco gc` has deleted old data (--keep window); `diloco verify` shows what is left"
    ]
    assert plan_gc(found, "window", CLOCK).keys == ()  # nothing is left to do


@pytest.mark.quick(1)
@pytest.mark.parametrize("tries", [1, 3, 10_000], ids=["one blob", "some", "never"])
def test_it_makes_room_for_its_own_record_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    """Before: "cannot write control/000001.json: No space left", and the command that frees space could not run."""
    run = played(tmp_path)
    found = ended(run)
    plan = plan_gc(found, "window", CLOCK)
    refused, write = list[int](), give_back.write_control

    def full_at_first(*args: Any, **changes: Any) -> None:
        refused.append(sum(not (run.folder / key).exists() for key in plan.keys))
        if len(refused) <= tries:
            raise StoreFull("cannot write it: No space left on device. Free some space on that disk")
        write(*args, **changes)

    monkeypatch.setattr(give_back, "write_control", full_at_first)
    with pytest.raises(StoreFull) if tries > len(plan.keys) else nullcontext():
        collect(found, plan, CLOCK)
    assert not [key for key in plan.keys if (run.folder / key).exists()]
    assert refused == [*range(1 + min(tries, len(plan.keys)))], "one blob more for each try"


def test_the_run_goes_on_after_it(tmp_path: Path) -> None:
    run = played(tmp_path)
    found = ended(run)
    collect(found, plan_gc(found, "window", CLOCK), CLOCK)
    write_control(found.store, CLOCK, resume=True)
    run.puppets = {slot: run.add(slot) for slot in run.puppets}  # new generations, which heal from the kept blobs
    assert {p.rv.step for p in run.puppets.values()} == {12}
    run.rounds(3)
    assert verify(read_run(run.url)).good


@pytest.mark.slow
def test_killed_between_the_record_and_the_deletions_it_goes_on(tmp_path: Path) -> None:
    run = played(tmp_path)
    found = ended(run)
    plan = plan_gc(found, "window", CLOCK)
    write_control(found.store, CLOCK, keep="window")
    found.store.delete(plan.keys[:7])
    assert verify(found).good
    again = plan_gc(found, "window", CLOCK)
    assert again.keys == plan.keys[7:]
    collect(found, again, CLOCK)
    assert plan_gc(found, "window", CLOCK).keys == () and verify(found).good


@pytest.mark.slow
def test_a_size_keeps_as_much_as_fits(tmp_path: Path) -> None:
    run = played(tmp_path, steps=30)
    found = ended(run)
    total = sum(path.stat().st_size for path in blobs(run))
    reach = dict[float, int]()
    for share in (0.9, 0.6, 0.4):
        plan = plan_gc(found, f"{int(share * total)} B", CLOCK)
        assert total - sum(plan.freed.values()) <= share * total
        reach[share] = len(plan.lost)
    assert reach[0.9] <= reach[0.6] <= reach[0.4] and reach[0.4] > 0
    assert plan_gc(found, f"{10 * total} B", CLOCK).keys == ()


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ("all", "--keep all is not a size. Use a size such as"),
        ("many", "--keep many is not a size"),
        ("-3 GB", "is not a size"),
    ],
)
def test_a_size_that_is_none(tmp_path: Path, keep: str, words: str) -> None:
    found = ended(played(tmp_path, steps=1))
    with pytest.raises(ConfigError, match=words):
        plan_gc(found, keep, CLOCK)


def test_runs_that_are_not_to_be_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = PuppetRun(tmp_path, fleet={"keep": "all"})
    assert main(["gc", run.url, "--keep", "window"]) == 2
    assert "has taken no outer step yet" in capsys.readouterr().err
    run.rounds(8)
    assert main(["gc", run.url, "--keep", "window", "--yes"]) == 2
    assert "this run is not over, and its replicas may need every object" in capsys.readouterr().err
    ended(run)
    assert main(["gc", run.url, "--keep", "window"]) == 2
    assert "deleted objects do not come back. Add --yes, or look first with --dry-run" in capsys.readouterr().err
    before = len(blobs(run))
    assert main(["gc", run.url, "--keep", "window", "--yes"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "done" and len(blobs(run)) < before
    assert main(["gc", run.url, "--keep", "window", "--yes"]) == 0
    assert "nothing to delete" in capsys.readouterr().out


# ---------------------------------------------------------------------- recorded rollouts


def put_bundle(run: Run, slot: str, generation: int, step: int, *, actor: str = "", attempt: int = 0) -> str:
    record = Rollouts(
        run=run.record.nonce, slot=slot, place=(generation, 0), step=step, by=0 if actor else 1, engine="x", threads=1,
        rollouts=1, tokens=3, digest="xxh3-128:0", nonce="n", actor=actor,
    )  # fmt: skip
    key = layout.bundle_key(slot, generation, 0, attempt)
    run.store.put(key, seal_bundle(b"tokens", record))
    return key


def recorded(tmp_path: Path, parent: int = 0) -> tuple[Run, Any]:
    """A run of 12 steps with two generations in each, all on their own weights."""
    found = ended(played(tmp_path, staleness=2))
    if parent:
        found = replace(found, record=replace(found.record, parent=replace(found.record.parent, outer_steps=parent)))
    for slot in ("r00", "r01"):
        for step in range(12):
            for generation in (2 * step, 2 * step + 1):
                put_bundle(found, slot, generation, parent + step)
    return found, plan_gc(found, "window", CLOCK).after.since


def generations(keys: Any, slot: str) -> list[int]:
    return [int(key.split("/")[2]) for key in keys if key.startswith(f"rollouts/{slot}/") and key.endswith(".bundle")]


@pytest.mark.quick(1)
@pytest.mark.parametrize("parent", [0, 500], ids=["a run of its own", "a fork"])
def test_recorded_rollouts_go_with_theta_of_their_steps(tmp_path: Path, parent: int) -> None:
    """Before: all stayed, and a second `diloco gc` said that there is nothing to delete."""
    run, since = recorded(tmp_path, parent)
    plan = plan_gc(run, "window", CLOCK)
    assert since > 3 and generations(plan.keys, "r00") == generations(plan.keys, "r01") == [*range(2 * since)]
    sizes = [len(run.store.get(key) or b"") for key in plan.keys if key.startswith("rollouts/")]
    assert plan.freed["bundle"] == sum(sizes) > 0 and plan.unnamed == 0
    assert "MB of bundles" in plan_lines(run.url, plan)[0]
    run.store.delete([key for key in plan.keys if not key.startswith("rollouts/")])  # killed in the middle
    again = plan_gc(run, "window", CLOCK)
    assert set(again.keys) == {key for key in plan.keys if key.startswith("rollouts/")}
    collect(run, again, CLOCK)
    assert generations(run.store.list("rollouts/"), "r01") == [*range(2 * since, 24)]
    assert plan_gc(run, "window", CLOCK).keys == ()


def test_all_that_stands_beside_a_bundle_goes_with_it_as_in_a_running_run(tmp_path: Path) -> None:
    run, since = recorded(tmp_path)
    beside = [
        layout.beside_bundle(layout.bundle_key("r00", generation, 0, 0), ending)
        for generation in (1, 2 * since)
        for ending in ("verdict", "0003.human.reward")
    ]
    for key in beside:
        run.store.put(key, b"{}")
    plan = plan_gc(run, "window", CLOCK)
    assert [key for key in beside if key in plan.keys] == beside[:2]
    assert "deleted with these rollouts: 1. Save them first: diloco traces" in plan_lines(run.url, plan)[-1]
    run.store.delete([layout.bundle_key("r00", 1, 0, 0)])
    assert set(beside[:2]) <= set(plan_gc(run, "window", CLOCK).keys), "a collector was killed between them"


def test_a_bundle_stays_if_a_kept_step_may_have_trained_on_it(tmp_path: Path) -> None:
    run, since = recorded(tmp_path)
    put_bundle(run, "r00", 2 * since - 3, since - 2, actor="a00")  # fleet.staleness = 2: step `since` may use it
    put_bundle(run, "r01", 2 * since - 5, since, attempt=1)  # a replacement took these rows again
    put_bundle(run, "r01", 99, 0, actor="a00")  # no replica trained on it; it comes after those that stay
    put_bundle(run, "r01", 2, 10**6, actor="a00")  # a false record keeps nothing
    run.store.put(layout.bundle_key("r00", 3, 0, 1), b"torn")
    run.store.put("rollouts/r00/note.txt", b"yours")
    keys = plan_gc(run, "window", CLOCK).keys
    assert generations(keys, "r00") == sorted([*range(2 * since - 3), 3])
    assert generations(keys, "r01") == [*range(2 * since - 5)]
    assert "rollouts/r00/note.txt" not in keys


def test_no_rollouts_go_while_theta_of_all_steps_can_be_computed(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path)
    run.store.put(layout.bundle_key("r02", 0, 0, 0), b"torn")
    assert plan_gc(run, "5 TB", CLOCK).keys == ()

"""`diloco gc`: what a run needs no more goes, by the rules of its collectors; readers know; what is needed stays."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from diloco.audit.verify import verify
from diloco.model import give_back
from diloco.model.export import model_record, state_at, what_is_kept
from diloco.model.give_back import collect, plan_gc
from diloco.run.config import ConfigError
from diloco.run.record import Run, read_run
from diloco.runlog.reader import read_report
from diloco.runlog.summary import kept_words
from executors.cli.main import main
from rendezvous.agreement.membership import read_control, write_control
from rendezvous.clock import SystemClock
from rendezvous.errors import StoreFull
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
    with pytest.raises(ConfigError, match=r"step 3 cannot be exported any more: what is kept \(fleet.keep = window\)"):
        state_at(found, record, 3)
    verdict = verify(found)
    assert verdict.good and any("is gone (collected, fleet.keep)" in text for text in verdict.unchecked)
    assert kept_words(read_report(open_store(run.url))) == [
        "`diloco gc` has deleted old data (--keep window); `diloco verify` shows what is left"
    ]
    assert plan_gc(found, "window", CLOCK).keys == ()  # nothing is left to do


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
        ("all", "--keep all is not a size. Use one such as"),
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

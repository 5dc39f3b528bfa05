"""The table of event kinds: complete for all that is emitted and read, and shown by every view."""

import ast
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from diloco.audit.explain import _is_end
from diloco.audit.step_facts import NOTED
from diloco.events import DATA, KINDS, LAUNCH_BEGINS, LAUNCH_ENDS, MARKED, ON_PAGE, SESSION_ENDS, SHOWN, WARNINGS
from diloco.process import exitcodes
from diloco.process.journal import Journal
from diloco.replica.exits import end_session
from diloco.runlog.reader import read_report
from diloco.runlog.sessions import BAD_ENDS
from diloco.views.page.data import page_data
from diloco.views.troubles import DETECTORS
from executors.cli.looking.lines import Lines
from executors.cli.looking.status import status_dict, status_table
from executors.cli.watch.words import event_lines
from executors.supervision.money import bills
from executors.supervision.notices import messages
from executors.supervision.notices.messages import all_troubles, message_lines
from executors.supervision.slots import launches
from rendezvous import errors
from rendezvous.clock import SystemClock
from rendezvous.keeping.garbage import Collected
from rendezvous.records.records import WireError
from rendezvous.stores.memory import MemoryStore
from tests.diloco.test_report import T0, Bucket, killed_and_replaced

ROOT = Path(__file__).parents[2]
ROOMS = ("executors", "diloco", "rendezvous", "inner")
EMITS = {"emit", "_emit", "book", "_emit_end"}
OF_OTHERS = {"runs"}  # Emit protocols of code that is not a run's


@cache
def trees() -> list[tuple[Path, ast.Module]]:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [(path, ast.parse(path.read_text())) for path in paths]


def literals(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def first_arguments(names: set[str]) -> dict[str, Path]:
    """String literals that stand first in calls of these names, also on either side of an `if … else`."""
    found: dict[str, Path] = {}
    for path, tree in trees():
        for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call) and name_of(n) in names and n.args):
            first = call.args[0]
            sides = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
            found |= {s.value: path for s in sides if isinstance(s, ast.Constant) and isinstance(s.value, str)}
    return found


def test_every_kind_that_is_emitted_by_a_literal_is_in_the_table() -> None:
    emitted = first_arguments(EMITS)
    assert len(emitted) > 50, "the search finds what is there"
    assert {kind: path for kind, path in emitted.items() if kind not in KINDS} == {}


def test_every_kind_of_the_table_is_written_somewhere() -> None:
    elsewhere = set[str]().union(*(literals(tree) for path, tree in trees() if path.name != "events.py"))
    assert set(KINDS) - elsewhere == set()


def test_every_kind_that_a_reader_asks_for_is_in_the_table() -> None:
    asked = {
        s
        for _, tree in trees()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and name_of(call) == "of_kind"
        for s in (a.value for a in call.args if isinstance(a, ast.Constant))
    }
    asked |= {*LAUNCH_BEGINS, *bills.ENDS, *bills.WAITS, *launches.BEGUN, *messages.SETTLES}
    asked |= {*messages.ABOUT, *messages.REASONS, *LAUNCH_ENDS, *SESSION_ENDS}
    assert asked - set(KINDS) == set()


def test_a_kind_that_is_not_in_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="'forgd' is not a kind of event; add it to KINDS"):
        Journal(MemoryStore(), SystemClock(), "r00", 1).emit("forgd", text="?")


def test_the_levels_are_nested_and_each_kind_is_explained() -> None:
    assert WARNINGS < MARKED < SHOWN < ON_PAGE and {kind for kind in KINDS if KINDS[kind].level == DATA}.isdisjoint(
        ON_PAGE
    )
    assert all(about.text.endswith(".") and not about.advice.endswith(".") for about in KINDS.values())
    bad = {"killed", "lost", "crashed", "diverged", "outdated", "bad delta", "refused", "gave up", "hung"}
    assert set(BAD_ENDS) == bad


ERRORS = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.RendezvousError)]


@pytest.mark.parametrize("error", [*ERRORS, Collected, WireError], ids=lambda cls: cls.__name__)
def test_each_error_of_the_rendezvous_ends_its_session_by_a_kind_of_session_ends(error: type[Exception]) -> None:
    told: list[str] = []
    quiet = SimpleNamespace(emit=lambda kind, **_: told.append(kind), end=lambda: None, rv=MagicMock())
    end_session(cast(Any, quiet), cast(Any, error.__new__(error)))
    (kind,) = told
    assert kind in SESSION_ENDS
    assert kind == "outdated" or error is not Collected


def test_an_actor_that_may_not_write_gives_up_and_is_no_crash() -> None:
    """Before: exit code 1, three times; `status` had no reason."""
    session, error = MagicMock(), errors.StoreReadOnly("cannot create s3://b/run/rollouts/r00: 403 AccessDenied")
    assert end_session(session, error) == exitcodes.GAVE_UP
    assert session.emit.call_args.args == ("gave_up",)


@pytest.mark.parametrize("kind", ["outdated", "collected"])  # logs before 2026-11-28 have "collected" with a text
def test_a_session_whose_object_was_deleted_has_an_end_and_a_garbage_collection_is_none(kind: str) -> None:
    b = Bucket()
    for slot in ("r00", "r01"):
        b.claim(slot, 1, 0.5)
    b.tell("r00", 1, 5.0, kind, step=3, text="step 3 cannot be read any more")
    b.tell("r00", 1, 4.0, "collected", blobs=3, below=3, deltas_from=3, means_from=3, snapshots=[0, 4])
    b.tell("r01", 1, 5.0, "collected", blobs=3, below=3, deltas_from=3, means_from=3, snapshots=[0, 4])
    report = read_report(b.store)
    said = [(session.how, session.said) for session in report.sessions]
    assert said == [("outdated", "step 3 cannot be read any more"), ("running", "")]
    assert len(report.of_kind("collected")) == 2
    assert any("step 3 cannot be read" in line for line in status_table(report, T0 + 6, 200))


def test_the_catalogues_of_readers_come_from_the_table() -> None:
    ends = {*LAUNCH_ENDS, *SESSION_ENDS}
    assert all(_is_end({"event": kind}) == (kind in ends) for kind in KINDS)
    assert {*WARNINGS, *ends, "caught_up"} == NOTED


# -------------------------------------------------------------------- in every view


WRITTEN = {
    "forged": {"record": "offer", "key": "steps/000003/offer/r07/0001.json", "text": "not written with this run's key"},
    "poisoned": {"step": 3, "blob": "steps/000003/delta/r07-1-n.bin", "text": "counts for nothing: NaN"},
    "bad_offer": {"key": "steps/000003/offer/r07/0001.json", "text": "passed over: its codec is zip"},
}


@pytest.fixture(params=WRITTEN)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def run(kind: str) -> Bucket:
    b = killed_and_replaced()
    b.tell("r01", 2, 15.5, kind, **WRITTEN[kind])
    return b


def test_a_record_of_another_program_is_in_every_view(
    run: Bucket, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report, now = read_report(run.store), T0 + 16
    words = WRITTEN[kind]["text"]
    assert any(line.strip().startswith("!") and words in line for line in status_table(report, now, 200)), "status"
    import sys

    Lines(sys.stdout).show(report)
    assert f"event={kind}" in capsys.readouterr().out, "lines of status, without a terminal"
    assert any(words in line for line in event_lines(report)), "watch"
    (shown,) = [e for e in page_data(report, now)["head"]["events"] if e["kind"] == kind]
    assert shown["loud"] and words in shown["text"], "page"


def test_it_is_a_trouble_for_status_json_and_alerts(run: Bucket, kind: str) -> None:
    report, now = read_report(run.store), T0 + 16
    expected = "forged" if kind == "forged" else "bad_records"
    (found,) = [t for t in all_troubles(report, now) if t.kind == expected]
    assert "steps/000003/" in found.text and found.advice
    assert expected in {t["kind"] for t in status_dict(report, now)["troubles"]}


def test_all_troubles_are_told_the_most_urgent_first() -> None:
    b = killed_and_replaced()
    b.tell("supervisor", 1, 90.5, "alert_failed", host="hooks.example.com", text="it answered 500")
    b.tell("r01", 2, 90.5, "forged", **WRITTEN["forged"])
    b.tell("r01", 2, 90.6, "bad_offer", **WRITTEN["bad_offer"])
    b.tell("r01", 2, 90.7, "bad_delta", step=5, text="1 of 2 elements are not finite")
    report, now = read_report(b.store), T0 + 91
    assert [t.kind for t in all_troubles(report, now)] == ["diverged", "forged", "alerts_failed", "bad_records"]
    lines = [line for line in message_lines(report, now) if "docs/troubles.md" in line or "alerts do not" in line]
    kinds = ["#diverged", "#forged", "alerts do not reach", "#bad_records"]
    assert [kind in line for kind, line in zip(kinds, lines, strict=True)] == [True] * 4


def test_the_most_urgent_kinds_are_kinds_of_troubles() -> None:
    assert set(messages.MOST_URGENT) <= {*DETECTORS, *messages.HOST_DETECTORS}
    assert set(messages.HOST_DETECTORS) <= set(messages.MOST_URGENT)


def test_a_pseudogradient_of_our_own_session_is_told_once_as_diverged() -> None:
    b = killed_and_replaced()
    b.tell("r00", 1, 15.5, "poisoned", step=3, blob="steps/000003/delta/r01-2-n.bin", text="counts for nothing: NaN")
    assert "bad_records" not in {t.kind for t in all_troubles(read_report(b.store), T0 + 16)}

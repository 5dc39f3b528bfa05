"""`diloco verify`: a run is computed again from its bucket, without write access; a flipped bit is found by name."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.audit.inner import _offers_of_sessions
from diloco.audit.records import why_ineligible
from diloco.audit.verdict import Findings, Verdict
from diloco.audit.verify import verify
from diloco.model.give_back import plan_gc
from diloco.run.config import ConfigError
from diloco.run.record import read_run
from executors.cli import main as cli
from rendezvous import layout
from rendezvous.clock import SystemClock
from rendezvous.errors import RecordsLost
from rendezvous.records.records import Commit
from rendezvous.stores.files import FileStore
from tests.support.audit import audit
from tests.support.fleet import Fleet
from tests.support.s3_server import S3Server

STEPS = 5
FOREVER = 1 << 30


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two replicas that is done."""
    folder = tmp_path_factory.mktemp("verified")
    fleet = Fleet(folder, fleet={"replicas": 2, "steps": STEPS})
    fleet.start_all()
    assert fleet.wait() == {"r00": [0], "r01": [0]}
    return Path(fleet.url)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def verified(run: Path, step: int | None = None) -> Verdict:
    return verify(read_run(str(run)), step)


def flip(path: Path, at: int = -5) -> str:
    body = bytearray(path.read_bytes())
    body[at] ^= 1
    path.write_bytes(body)
    return path.name


def the_one(run: Path, pattern: str) -> Path:
    return sorted(run.glob(pattern))[0]


def test_a_good_run_is_equal_and_says_as_much_as_the_independent_audit(finished: Path) -> None:
    found = verified(finished)
    assert found.good, found.lines()
    assert list(found.digests.values()) == audit(finished).digests and found.thetas == list(range(STEPS + 1))
    assert found.from_deltas == list(range(STEPS)) and "inner steps" in found.unchecked[0] and len(found.unchecked) == 1


@pytest.mark.slow
def test_without_wide_vector_instructions_the_digests_are_the_same(finished: Path) -> None:
    """numpy and torch as on a CPU without AVX, and no kernel of ours.  SSE, which every x86-64 has, stays on."""
    with_vectors = verified(finished).digests
    vectors = " ".join(np.show_config(mode="dicts")["SIMD Extensions"]["found"])
    code = (
        "import sys; import numpy as np; assert not np.show_config(mode='dicts')['SIMD Extensions'].get('found')\n"
        "import rendezvous.means.reduce as reduce; reduce.load_mean_kernel = lambda name: None\n"
        "from executors.cli.main import main; sys.exit(main(['verify', sys.argv[1], '--json']))"
    )
    plain = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": vectors}
    done = subprocess.run([sys.executable, "-c", code, finished], capture_output=True, text=True, env=plain, check=True)
    assert {int(t): base for t, base in json.loads(done.stdout)["digests"].items()} == with_vectors


@pytest.mark.parametrize(
    ("pattern", "step", "slot"),
    [("steps/0000000002/mean/*.bin", 2, ""), ("steps/0000000003/delta/r01-*.bin", 3, "r01"),
     ("snapshots/0000000002/*.safetensors", 2, "")],
)  # fmt: skip
def test_a_flipped_bit_is_found_by_name(run: Path, pattern: str, step: int, slot: str) -> None:
    if not list(run.glob(pattern)):
        pytest.fail(f"this run has no {pattern}: {sorted(p.as_posix() for p in run.rglob('*'))}")
    name = flip(the_one(run, pattern))
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    found = verified(run)
    assert [(d.step, Path(d.blob).name, d.slot) for d in found.differences] == [(step, name, slot)], found.lines()
    assert found.thetas == list(range(STEPS + 1)), "the replay goes on past it"
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before, "nothing is put back"


def test_a_gone_blob_that_no_collector_can_have_deleted_is_a_difference(run: Path) -> None:
    """Before: "collected, fleet.keep", and exit code 0, though no replica could compute θ again."""
    shutil.rmtree(run / f"snapshots/{STEPS:010d}")  # as before the run's end
    last = [the_one(run, f"steps/{STEPS - 1:010d}/{what}") for what in ("delta/r01-*.bin", "mean/*.bin")]
    early = the_one(run, "steps/0000000000/delta/r01-*.bin")
    for path in (*last, early):
        path.unlink()
    found = verified(run)
    assert {d.blob for d in found.differences} == {path.relative_to(run).as_posix() for path in last}
    assert "no later snapshot replaces it" in found.differences[0].text
    assert any(f"{early.name} is gone (collected, fleet.keep)" in text for text in found.unchecked)


def test_blobs_that_are_gone_cost_one_look_at_the_snapshots(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, looked = FileStore(str(run)), list[str]()
    real = store.list
    monkeypatch.setattr(store, "list", lambda prefix: (looked.append(prefix), real(prefix))[1])
    found = Findings(Verdict(), store, keeps_all=False)
    for t in range(STEPS):
        found.missing(t, layout.delta_blob(t, "r00", 1, "gone"))
    assert len(found.verdict.unchecked) == STEPS and looked.count(layout.SNAPSHOTS) == 1


def test_an_announcement_of_an_absurd_size_is_a_difference_and_takes_no_memory(run: Path) -> None:
    path = the_one(run, "steps/0000000002/mean/*.json")
    path.write_text(re.sub(r'"size":\d+', f'"size":{1 << 53}', path.read_text()))
    found = verified(run)
    assert {d.step for d in found.differences} == {2} and found.thetas == list(range(STEPS + 1)), found.lines()


def test_a_replica_that_held_another_theta_is_named(run: Path) -> None:
    log = next(p for p in sorted(run.glob("log/r01-1/*.jsonl")) if '"event":"step"' in p.read_text().replace(" ", ""))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    changed = next(line for line in lines if line.get("event") == "step")
    changed["theta"] = "0" * 32
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + "an odd line\n")
    found = verified(run)
    assert [(d.step, d.slot) for d in found.differences] == [(changed["step"] + 1, "r01-1")], found.lines()


def test_a_commit_that_was_edited_is_named_and_what_follows_is_unchecked(run: Path) -> None:
    path = run / layout.commit_key(2)
    path.write_bytes(path.read_bytes().replace(b'"mode":"direct"', b'"mode":"direkt"'))
    found = verified(run)
    assert [(d.step, d.blob) for d in found.differences] == [(2, layout.commit_key(2))]
    assert any("all after commit 2" in text for text in found.unchecked)


def test_a_commit_that_vanished_is_named(run: Path) -> None:
    (run / layout.commit_key(2)).unlink()
    found = verified(run)
    assert [(d.step, d.blob) for d in found.differences] == [(2, layout.commit_key(2))], found.lines()
    assert found.thetas == [0, 1, 2]
    taken_again = _offers_of_sessions(FileStore(run))  # before: --inner ended here, without a verdict
    assert {t for offers in taken_again.values() for t in offers} == {0, 1}


LOST = {
    "the newest commit": ["steps/0000000004/commit.json"],
    "the newest step": ["steps/0000000004"],
    "two steps": ["steps/0000000003", "steps/0000000004"],
    "all steps": ["steps"],
    "a wide hole": ["steps/0000000001/commit.json", "steps/0000000002/commit.json", "steps/0000000003/commit.json"],
    "all but the leave records": ["steps/0000000004", "snapshots/0000000004", "snapshots/0000000005", "log"],
    "all but the logs": ["steps/0000000004", "snapshots/0000000004", "snapshots/0000000005", "leave"],
    "all but an offer": ["steps/0000000003/commit.json", "steps/0000000004/commit.json", "snapshots", "leave", "log"],
}


@pytest.mark.parametrize("gone", LOST.values(), ids=LOST)
def test_commits_that_vanished_from_the_end_are_missed_by_what_was_written_after_them(
    run: Path, gone: list[str]
) -> None:
    """It said that everything was equal, and ended with 0."""
    for path in map(run.joinpath, gone):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    first = next(t for t in range(STEPS) if not (run / layout.commit_key(t)).exists())
    found = verified(run)
    assert (first, layout.commit_key(first)) in [(d.step, d.blob) for d in found.differences], found.lines()
    assert f"commit {first} is missing, though" in found.differences[0].text and not found.good


def other_fence(raw: dict[str, Any]) -> dict[str, Any]:
    return {"fence": {**raw["fence"], "r00": 7}}


EDITS: dict[str, tuple[Any, str]] = {
    "time": (lambda raw: {"at": 1.0}, "was altered"),
    "pace": (lambda raw: {"pace": 7.0}, "was altered"),
    "snapshot": (lambda raw: {"snapshot": raw["snapshot"] ^ 1}, "was altered"),
    "fence": (other_fence, "names r00-7, and no session claimed that"),
    "closer": (lambda raw: {"by": "r07-3"}, "names r07-3, and no session claimed that"),
    "no closer": (lambda raw: {"by": "me"}, "names 'me' as its closer"),
    "order": (lambda raw: {"offers": raw["offers"][::-1]}, "does not list fresh offers by slot"),
}


@pytest.mark.parametrize(("edit", "words"), EDITS.values(), ids=EDITS)
def test_the_last_commit_is_held_by_the_snapshot_after_it(run: Path, edit: Any, words: str) -> None:
    """Only the next commit's `prev` was compared, and the last one has no next."""
    path = run / layout.commit_key(STEPS - 1)
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, **edit(raw)}, sort_keys=True, separators=(",", ":")))
    found = verified(run)
    assert words in str(found.lines()), found.lines()
    assert (STEPS, layout.snapshot_key(STEPS)) in [(d.step, d.blob) for d in found.differences]
    path.write_text(json.dumps(raw, sort_keys=True, separators=(",", ":")) + "\r\n")
    assert not verified(run).good


def test_a_leave_record_and_a_model_record_of_another_theta_are_named(run: Path) -> None:
    leave, model = the_one(run, "leave/*.json"), run / layout.MODEL_MANIFEST
    leave.write_text(re.sub(r'"base":"\w+"', f'"base":"{"0" * 32}"', leave.read_text()))
    model.write_text(re.sub(r'"theta":"[^"]+"', f'"theta":"xxh3-128:{"0" * 32}"', model.read_text()))
    found = verified(run)
    assert {(d.step, d.blob) for d in found.differences} == {
        (0, layout.MODEL_MANIFEST), (STEPS, leave.relative_to(run).as_posix())
    }  # fmt: skip


@pytest.mark.parametrize("pattern", ["model/*/tokenizer.json", "model/*/model.safetensors", "code/*/*"])
def test_files_of_the_model_and_of_the_user_are_compared(run: Path, pattern: str) -> None:
    path = the_one(run, pattern)
    flip(path)
    found = verified(run)
    assert [d.blob for d in found.differences] == [path.relative_to(run).as_posix()], found.lines()


def test_a_line_that_is_nested_without_end_is_no_event(run: Path) -> None:
    """It ended with RecursionError."""
    (run / "log/r00-1/000099.jsonl").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}\n")
    assert verified(run).good


def test_a_lost_model_manifest_is_lost_and_not_yet_to_come(run: Path) -> None:
    (run / layout.MODEL_MANIFEST).unlink()
    for act in verified, lambda run: plan_gc(read_run(str(run)), "window", SystemClock()):
        with pytest.raises(RecordsLost, match=r"manifest.json is lost, though the run has begun.*before you resume"):
            act(run)


def test_explain_on_a_chain_with_a_hole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ended with KeyError."""
    (run / layout.commit_key(2)).unlink()
    for step in "2", "3":
        assert cli.main(["explain", str(run), "--step", step]) == 2
        assert "commit 2 is missing, though step" in capsys.readouterr().err


def test_what_was_collected_is_said_and_is_no_difference(run: Path) -> None:
    for path in run.glob("steps/0000000000/*/*.bin"):
        path.unlink()
    found = verified(run)
    assert found.good and found.thetas == [0, *range(2, STEPS + 1)], found.lines()
    assert any("θ of steps 1 to 1" in text for text in found.unchecked)


def test_a_listing_that_lags_hides_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compared nothing, said that everything was equal, and ended with 0."""
    monkeypatch.setattr(FileStore, "list", lambda store, prefix: [])
    found = verified(run)
    assert found.good and len(found.thetas) > 1 and found.from_deltas


def test_a_verdict_on_nothing_is_no_good_one(run: Path) -> None:
    for path in run.glob("snapshots/*/manifest.json"):
        path.unlink()
    found = verified(run)
    assert not found.good and found.lines()[-1] == "nothing could be compared"


def test_one_step_alone_and_steps_that_cannot_be_had(run: Path) -> None:
    assert verified(run, 3).thetas == [2, 3]
    with pytest.raises(ConfigError, match=f"step 9 has not been taken: the run is at step {STEPS}"):
        verified(run, 9)
    for path in [*run.glob("steps/0000000000/*/*.bin"), *run.glob("snapshots/0000000000/*.saf*")]:
        path.unlink()
    with pytest.raises(ConfigError, match=r"θ_1 cannot be .* any more.*reaches back to step 2"):
        verified(run, 1)


@pytest.mark.slow
def test_the_command_on_a_bucket_that_refuses_to_be_written(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from rendezvous.stores.open import open_store

    keys: dict[str, Any] = {"AWS_ACCESS_KEY_ID": "AKIDTEST", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1"}
    with S3Server(access_key="AKIDTEST") as s3:
        for name, value in {**keys, "AWS_ENDPOINT_URL": s3.endpoint}.items():
            monkeypatch.setenv(name, value)
        store = open_store("s3://bucket/run")
        for path in (p for p in finished.rglob("*") if p.is_file()):
            store.put(path.relative_to(finished).as_posix(), path.read_bytes())
        mean = the_one(finished, "steps/0000000002/mean/*.bin")
        store.put(mean.relative_to(finished).as_posix(), b"\1" + mean.read_bytes()[1:])
        s3.fault("403", op="Put|Post|Delete|Create", times=FOREVER)
        assert cli.main(["verify", "s3://bucket/run"]) == 1
        assert f"differs: step 2: steps/0000000002/mean/{mean.name}: the stored mean" in capsys.readouterr().out
        assert cli.main(["explain", "s3://bucket/run", "--step", "1"]) == 0
        assert "the outer step moved θ by" in capsys.readouterr().out
        assert cli.main(["blame", "s3://bucket/run", "--from", "2", "--no-metric"]) == 0
        assert "without r01" in capsys.readouterr().out
        assert cli.main(["bisect", "s3://bucket/run", "--", "sh", "-c", "test {step} -lt 4"]) == 0
        assert "outer step 3 made it from θ_3" in capsys.readouterr().out
        assert cli.main(["gc", "s3://bucket/run", "--keep", "window", "--dry-run"]) == 0
        assert "nothing was deleted" in capsys.readouterr().out
        assert not [fault for fault in s3.faults if fault.times < FOREVER], "nothing was asked to be written"


@pytest.mark.parametrize(
    ("t", "step", "generation", "fragments", "flaw"),
    [
        (7, 7, 2, 1, ""), (7, 6, 2, 1, ""), (7, 5, 2, 2, ""),
        (7, 6, 2, 2, "another fragment"), (7, 4, 2, 1, "it is 3 syncs late, and at most 2 are allowed"),
        (7, 7, 1, 1, "generation 1, and commit 6 fences all before 2"),
    ],
)  # fmt: skip
def test_a_commit_that_lists_what_it_may_not_is_a_difference(
    run: Path, t: int, step: int, generation: int, fragments: int, flaw: str
) -> None:
    """Before: a fenced generation, and a late Δ of the other fragment, were averaged and called good."""
    rules = replace(read_run(str(run)).config.outer.rules, fragments=fragments)
    first = Commit.decode((run / layout.commit_key(0)).read_bytes())
    before = replace(first, t=step - 1, fence={"r00": 2})
    told = why_ineligible(rules, before, t, replace(first.offers[0], step=step, slot="r00", generation=generation))
    assert flaw in told and bool(told) == bool(flaw)


def test_audits_import_transformers_only_for_a_start_model_that_they_read() -> None:
    """`verify` and `explain` of small runs took twice as long."""
    code = "import sys, diloco.audit.verify, diloco.audit.explain, diloco.audit.step_facts"
    done = subprocess.run([sys.executable, "-c", f"{code}; print('transformers' in sys.modules)"], capture_output=True)
    assert done.stdout == b"False\n", done.stderr.decode()

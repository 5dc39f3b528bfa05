"""Faults while a run lives, with real replica processes: said clearly, and nothing is lost."""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.model.export import export, state_at
from diloco.model.publish import publish
from diloco.process import exitcodes
from diloco.run.config import RunConfig
from diloco.run.founding import open_run, refuse_layout
from diloco.runlog.reader import read_report
from executors.supervision.notices.messages import all_troubles
from rendezvous import layout
from rendezvous.agreement.rules import Rules
from rendezvous.clock import SystemClock
from rendezvous.errors import WrongRun
from rendezvous.records.records import Claim, Offer, Snapshot
from rendezvous.records.wire import shard_grid
from tests.support.audit import check_run, logged_digests
from tests.support.body_digests import body_digests
from tests.support.fleet import ENDLESS, Fleet

SLOW: dict[str, Any] = {"outer": {"sync_every": 20, "snapshot_every": 2}, "fleet": {"steps": ENDLESS}}


def events(fleet: Fleet, kind: str) -> list[dict[str, object]]:
    lines = [ln for p in (fleet.folder / "run").glob("log/*/*.jsonl") for ln in p.read_text().splitlines()]
    return [e for e in map(json.loads, lines) if e.get("event") == kind]


@pytest.mark.slow
@pytest.mark.parametrize(("error", "words"), [("ENOSPC", "Free some space"), ("EROFS", "Make the folder writable")])
def test_a_store_that_cannot_be_written_for_a_while(tmp_path: Path, error: str, words: str) -> None:
    """One replica's disk is full (read-only) from its 10th write on for some seconds: it says so, waits, goes on."""
    fleet = Fleet(tmp_path)
    fleet.start("r00", die=f"fail:{error}:10@3.0")
    fleet.start("r01")
    fleet.start("r02")
    assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    assert words in fleet.log("r00").read_text()
    check_run(tmp_path / "run", 6)


@pytest.mark.slow
def test_a_store_that_stays_full_ends_the_replica_resumable(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.start("r00", die="fail:ENOSPC:10@1000", TEST_STORE_PATIENCE="2")
    fleet.start("r01")
    fleet.start("r02")
    codes = fleet.wait()
    assert codes == {"r00": [exitcodes.GAVE_UP], "r01": [0], "r02": [0]}, fleet.logs()
    assert "run the same command again" in fleet.log("r00").read_text()
    check_run(tmp_path / "run", 6)


def grown(fleet: Fleet, steps: int) -> None:
    """A run with `steps` committed steps whose whole fleet is dead."""
    fleet.start_all()
    fleet.wait_for(lambda: fleet.commit(steps - 1))
    fleet.kill_all()


@pytest.mark.slow
def test_a_damaged_snapshot_is_detected_and_mended(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, **SLOW)
    grown(fleet, 4)
    fleet.end_in(2)
    newest = max((tmp_path / "run" / "snapshots").glob("*/manifest.json"))
    blob = tmp_path / "run" / json.loads(newest.read_text())["blob"]
    body = blob.read_bytes()
    blob.write_bytes(body[: len(body) // 2])
    fleet.start_all()
    codes = fleet.wait()
    assert all(lives[-1] == 0 for lives in codes.values()), fleet.logs()
    assert events(fleet, "bad_snapshot") and events(fleet, "repaired")
    assert blob.read_bytes() == body
    check_run(tmp_path / "run", len(fleet.commits()))


@pytest.mark.slow
def test_a_damaged_delta_is_never_averaged(tmp_path: Path) -> None:
    """A rotten blob of a committed step: later readers take the announced mean, which has the same bits."""
    fleet = Fleet(tmp_path, outer={"snapshot_every": 100})
    fleet.start_all()
    fleet.wait()
    _, good = state_at(fleet.run, fleet.model, None)
    for path in (tmp_path / "run" / "steps").glob("*/delta/r01-*.bin"):
        path.write_bytes(bytes(len(path.read_bytes())))
    for snapshot in sorted((tmp_path / "run" / "snapshots").glob("*"))[1:]:
        (snapshot / "manifest.json").unlink()  # replay from the very beginning
    at, replayed = state_at(fleet.run, fleet.model, None)
    assert at == 6 and replayed.digest() == good.digest()


@pytest.mark.slow
def test_a_damaged_mean_is_computed_again(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, outer={"snapshot_every": 100})
    fleet.start_all()
    fleet.wait()
    _, good = state_at(fleet.run, fleet.model, 4)
    blob = next((tmp_path / "run" / "steps" / f"{2:010d}" / "mean").glob("*.bin"))
    body = blob.read_bytes()
    blob.write_bytes(body[:-8])
    _, replayed = state_at(fleet.run, fleet.model, 4)
    assert replayed.digest() == good.digest()
    assert blob.read_bytes() == body[:-8], "who only reads puts nothing back"


@pytest.mark.slow
def test_a_pseudogradient_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, inner={"lr": 1e30})
    fleet.start_all()
    codes = fleet.wait()
    assert codes == {s: [exitcodes.BAD_DELTA] for s in ("r00", "r01", "r02")}, fleet.logs()
    assert "not finite" in fleet.log("r00").read_text()
    assert fleet.commits() == []


def test_an_offer_that_is_not_finite_is_left_out_by_everybody(tmp_path: Path) -> None:
    """Without a run key an outsider can take a slot.  A blob of NaN, with its right digest, then moves nothing."""
    fleet = Fleet(tmp_path, outer={"sync_every": 20, "snapshot_every": 2})
    fleet.start("r00")
    fleet.start("r01")
    fleet.wait_for(lambda: fleet.store.get(layout.snapshot_key(0)))
    base = Snapshot.decode(fleet.store.get(layout.snapshot_key(0)) or b"").base
    elements = sum(math.prod(shape) for _, shape, _ in fleet.model.layout)
    body = np.full(elements, np.nan, np.float32)
    whole, shards = body_digests(body.view(np.uint8), "fp32", shard_grid(elements, 1, Rules().shard_elements))
    offer = Offer(
        0,
        "r02",
        1,
        "n",
        base,
        20,
        layout.delta_blob(0, "r02", 1, "n"),
        body.nbytes,
        whole,
        1.0,
        0.0,
        norm=1.0,
        shards=shards,
    )
    fleet.store.put(offer.blob, body.tobytes())
    fleet.store.put(layout.claim_key("r02", 1), Claim("r02", 1, "n", 0.0).encode())
    fleet.store.put(layout.offer_key(0, "r02", 0), offer.encode())
    assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
    assert [o.slot for o in fleet.commits()[0].offers] == ["r00", "r01", "r02"]
    assert {e["blob"] for e in events(fleet, "poisoned")} == {offer.blob}
    thetas = logged_digests(tmp_path / "run")
    assert len(thetas) == 6 and all(len(digests) == 1 for digests in thetas.values()), "one θ after every step"
    at, replayed = state_at(fleet.run, fleet.model, None)
    assert at == 6 and {replayed.digest()} == thetas[5]
    assert all(bool(theta.isfinite().all()) for theta in replayed.thetas)


def wire(path: Path, version: int) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "wire": version}))


@pytest.mark.parametrize("record", ["run.json", "model/manifest.json", f"steps/{0:010d}/commit.json"])
def test_a_record_of_another_release_ends_a_replica_for_good(tmp_path: Path, record: str) -> None:
    fleet = Fleet(tmp_path)
    if "steps" in record:
        grown(fleet, 1)
    wire(tmp_path / "run" / record, 99)
    fleet.start("r00")
    assert fleet.wait()["r00"][-1] == exitcodes.USER_ERROR, fleet.logs()
    log = fleet.log("r00").read_text()
    assert "version 99; run the release that started this run" in log and "Traceback" not in log


@pytest.mark.slow
def test_an_offer_of_another_release_is_passed_over(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    key = layout.offer_key(0, "r02", 0)
    fleet.store.put(key, b'{"kind":"offer","wire":99,"step":0,"slot":"r02"}')
    fleet.start_all()
    assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    assert {e["key"] for e in events(fleet, "bad_offer")} == {key}
    report = read_report(fleet.store)
    assert "bad_records" in {found.kind for found in all_troubles(report, report.last_sign)}
    assert fleet.store.get(layout.offer_key(0, "r02", 1)) is not None
    check_run(tmp_path / "run", 6)


def test_a_replica_whose_model_has_another_layout_is_refused(tmp_path: Path) -> None:
    """The same number of elements in another order: only the layout in the model's manifest can tell."""
    fleet = Fleet(tmp_path)
    path = tmp_path / "run" / layout.MODEL_MANIFEST
    manifest = json.loads(path.read_text())
    manifest["layout"].reverse()
    path.write_text(json.dumps(manifest))
    fleet.start("r00")
    assert fleet.wait() == {"r00": [exitcodes.USER_ERROR]}, fleet.logs()
    assert "another parameter layout than the run: parameter 0 is" in fleet.log("r00").read_text()
    assert fleet.commits() == []


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        ([["b", [2], "float32"], ["a", [2], "float32"]], r"parameter 0 is b \[2\] here, a \[2\] in the run"),
        ([["a", [2], "float32"], ["b", [3], "float32"]], r"parameter 1 is b \[3\] here, b \[2\] in the run"),
        ([["a", [2], "float32"]], r"parameter 1 is nothing \[\] here, b \[2\] in the run"),
    ],
)
def test_what_differs_in_a_layout_is_named(mine: list[list[object]], words: str) -> None:
    stands: list[list[object]] = [["a", [2], "bfloat16"], ["b", [2], "bfloat16"]]
    refuse_layout(stands, [[name, shape, "float32"] for name, shape, _ in stands])
    with pytest.raises(WrongRun, match=words):
        refuse_layout(stands, mine)


@pytest.mark.slow
def test_a_fleet_that_learns_nothing_is_told_loudly(tmp_path: Path) -> None:
    """Zero pseudogradients are honest and count; three steps of nothing but zeros are reported with a cause."""
    fleet = Fleet(tmp_path, inner={"lr": 1e-30})
    fleet.start_all()
    assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}
    assert all(o.zero for c in fleet.commits() for o in c.offers)
    assert "nothing_learned" in fleet.log("r00").read_text() and "too small" in fleet.log("r00").read_text()
    check_run(tmp_path / "run", 6)


REWARDS = {
    "raises at import": ("import nonexistent_module_xyz\n", "nonexistent_module_xyz"),
    "lacks the function": ("def other(completions, **_): return [0.0] * len(completions)\n", "exact"),
    "is not Python": ("def exact(:\n", "rewards.py"),
}


@pytest.mark.parametrize("case", REWARDS)
def test_a_reward_that_cannot_be_used(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, word = REWARDS[case]
    (tmp_path / "rewards.py").write_text(text)
    config = RunConfig.from_dict(
        {"inner": {"rewards": {"function": "rewards.py:exact"}, "toolworld": {"warm_start_steps": 1}}}, tmp_path
    )
    open_run(config, str(tmp_path / "run"), SystemClock())
    assert publish(str(tmp_path / "run")) == exitcodes.USER_ERROR
    said = capsys.readouterr().err
    assert word in said and "cannot publish" not in said  # the model is not to blame


def test_an_environment_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "world.py").write_text("raise RuntimeError('the world is broken')\n")
    config = RunConfig.from_dict(
        {"inner": {"sampling": {"environment": "world.py:World"}, "toolworld": {"warm_start_steps": 1}}}, tmp_path
    )
    open_run(config, str(tmp_path / "run"), SystemClock())
    assert publish(str(tmp_path / "run")) == exitcodes.USER_ERROR
    said = capsys.readouterr().err
    assert "the world is broken" in said and "world.py" in said
    with pytest.raises(WrongRun, match="Nothing was trained there yet"):  # mended: other mathematics, but none to lose
        (tmp_path / "world.py").write_text("class World: ...\n")
        open_run(config, str(tmp_path / "run"), SystemClock())


def test_export_of_any_step_loads_generates_and_repeats(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fleet = Fleet(tmp_path)
    fleet.start_all()
    fleet.wait()
    assert export(fleet.url, 3, tmp_path / "three") == 3
    assert export(fleet.url, None, tmp_path / "head") == 6
    export(fleet.url, None, tmp_path / "again")
    names = sorted(p.name for p in (tmp_path / "head").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "again").iterdir())
    for name in names:
        assert (tmp_path / "head" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name
    assert (tmp_path / "three" / "model.safetensors").read_bytes() != (
        tmp_path / "head" / "model.safetensors"
    ).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "head")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "head")("1 plus 2", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=4).shape[1] > tokens["input_ids"].shape[1]
    theta = check_run(tmp_path / "run", 6).theta[0]
    flat = [p.detach().reshape(-1).numpy() for p in model.parameters()]
    assert sum(f.size for f in flat) == theta.size
    assert b"".join(f.tobytes() for f in flat) == theta.tobytes(), "the export is the audited θ, bit for bit"


@pytest.mark.slow
def test_a_step_that_was_not_taken_cannot_be_exported(tmp_path: Path) -> None:
    from diloco.run.config import ConfigError

    fleet = Fleet(tmp_path)
    fleet.start_all()
    fleet.wait()
    with pytest.raises(ConfigError, match="has not been taken yet: the run is at step 6"):
        export(fleet.url, 9, tmp_path / "x")
    assert not os.path.exists(tmp_path / "x" / "model.safetensors")

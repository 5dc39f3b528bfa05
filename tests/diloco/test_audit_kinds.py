"""`verify` and `explain` on every kind of run: sealed, LoRA, fragments, lossy codecs, shards, late work; damage."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.audit.explain import explain
from diloco.audit.step_facts import read_step
from diloco.audit.verify import verify
from diloco.model.give_back import collect, plan_gc
from diloco.run import config
from diloco.run.record import read_run
from executors.cli.main import main
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules
from rendezvous.clock import SystemClock
from tests.support.puppets import PuppetRun

LORA = {"r": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}
SECRET = "a key of sixteen and more"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sealed": {},
    "lora": {"inner": {"lora": LORA}},
    "fragments": {"outer": {"fragments": 2, "fragment_sync_delay": 0}},
    "auto lr": {"outer": {"lr": "auto"}},
    "int8": {"outer": {"codec": "int8"}},
    "topk": {"outer": {"codec": "topk"}},
    "shards": {},
    "shards of int4": {"outer": {"codec": "int4"}},
    "sealed shards of a LoRA run": {"inner": {"lora": LORA}, "outer": {"codec": "int8"}},
}


FAST = ("plain", "fragments", "sealed shards of a LoRA run")  # the last one is sealed, with LoRA, a codec and shards


@pytest.fixture(params=[kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def played(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PuppetRun:
    """Six outer steps of three replicas; r02 is late for step 1, and its work is credited in a later one."""
    if "sealed" in request.param:
        monkeypatch.setenv("DILOCO_RUN_KEY", SECRET)
    if "shards" in request.param:
        small: Callable[..., Rules] = lambda **k: replace(Rules(**k), shard_from=1, shard_elements=1 << 8)  # noqa: E731
        monkeypatch.setattr(config, "Rules", small)
    run = PuppetRun(tmp_path, **KINDS[request.param])
    run.round()
    run.round("r00", "r01")
    run.catch_up("r02")
    run.rounds(4)
    return run


@pytest.mark.quick(2)
def test_every_kind_of_run_is_equal_and_a_flipped_bit_of_it_is_named(played: PuppetRun) -> None:
    commits = played.fleet.commits()
    late = [(c.t, o.step, o.slot) for c in commits for o in c.late_offers]
    sharded = [c.mode for c in commits].count("sharded")
    assert len(late) == 1 and late[0][1:] == (1, "r02"), late
    assert (sharded > 0) == (played.run.config.outer.rules.shard_from == 1)
    found = verify(read_run(played.url))
    assert found.good and found.thetas == [*range(7)] and found.from_deltas == [*range(6)], found.lines()
    assert len(found.unchecked) == 1
    blob = played.folder / next(o.blob for o in commits[late[0][0]].late_offers)
    body = bytearray(blob.read_bytes())
    body[len(body) // 2] ^= 4
    blob.write_bytes(body)
    damaged = verify(read_run(played.url))
    named = {(one.step, one.slot) for one in damaged.differences}
    assert (late[0][0], "r02") in named and {t for t, _ in named} == {late[0][0]}, damaged.lines()


def test_a_step_that_is_not_there_and_a_machines_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = PuppetRun(tmp_path)
    assert main(["explain", run.url, "--step", "0"]) == 2
    assert "this run has not taken an outer step yet" in capsys.readouterr().err
    run.rounds(2)
    assert main(["explain", run.url, "--step", "7"]) == 2
    assert "outer steps 0 to 1 have" in capsys.readouterr().err
    assert main(["explain", run.url, "--step", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["fate"] for one in told["offers"]] == ["counted"] * 3 and told["effect"]["step_norm"] > 0
    assert told["missing"] == [] and told["lines"][0].startswith("step 1 was closed by")


@pytest.mark.quick(2)
def test_every_kind_of_run_is_explained(played: PuppetRun) -> None:
    late_in = next(c.t for c in played.fleet.commits() if c.late_offers)
    run = read_run(played.url)
    before = {p: p.read_bytes() for p in played.folder.rglob("*") if p.is_file()}
    second = "\n".join(explain(read_step(run, 1)))
    assert "missing: r02: its offer came" in second and f"counted late, in step {late_in}, with weight" in second
    credited = explain(read_step(run, late_in))
    assert any(line.startswith("credited late: r02-1's 2 inner steps for step 1, with weight") for line in credited)
    assert any("the outer step moved" in line for line in credited), credited
    assert sum("cosine +" in line and "‖Δ‖" in line for line in credited) == 4, credited
    assert not [line for line in credited if "gone" in line]
    assert {p: p.read_bytes() for p in played.folder.rglob("*") if p.is_file()} == before
    json.dumps(vars(read_step(run, 0).effect)["gone"])


@pytest.mark.slow
def test_a_step_whose_bytes_were_collected_is_explained_as_far_as_records_go(tmp_path: Path) -> None:
    run = PuppetRun(tmp_path, fleet={"keep": "all"})
    run.rounds(12)
    found = read_run(run.url)
    write_control(found.store, SystemClock(), stop=True)
    whole = explain(read_step(found, 1))
    collect(found, plan_gc(found, "window", SystemClock()), SystemClock())
    left = explain(read_step(found, 1))
    assert [line for line in left if "counted with weight" in line] == [
        line for line in whole if "counted with" in line
    ]
    assert left[:2] == whole[:2] and not [line for line in left if "the outer step moved" in line]
    unknown = [line for line in left if line.startswith("not known: ")]
    assert any("the mean: " in line for line in unknown), left


def test_an_offer_that_the_norm_gate_damped(tmp_path: Path) -> None:
    run = PuppetRun(tmp_path, fleet={"keep": "all"}, outer={"norm_gate": 3.0})
    honest = run.delta
    run.delta = lambda slot, step, state: honest(slot, step, state) * (50 if (slot, step) == ("r01", 6) else 1)
    run.rounds(8)
    lines = explain(read_step(read_run(run.url), 6))
    (gated,) = [line for line in lines if "of which the norm gate left" in line]
    assert gated.lstrip().startswith("r01-1 at ") and not [x for x in explain(read_step(run.run, 5)) if "gate" in x]

"""bf16 weights of a real fleet: processes, kill -9 between a blob and its manifest, a reader of its own, a run key.

replicas ── weights/{t} ──▶ follow_weights ──▶ bf16 of θ_t as the audit computes it from snapshots and means
"""

from pathlib import Path

import pytest
import torch

from diloco.model.export import model_record, state_at
from diloco.run.config import ConfigError
from diloco.run.record import read_run
from rendezvous import follow_weights, layout
from rendezvous.stores.run_key import KEY, open_signed
from rendezvous.weights.follower import WeightsFollower
from rendezvous.weights.writer import read_weights
from tests.support.fleet import Fleet, config

STEPS = 6
BROADCAST = {"broadcast_weights": True, "steps": STEPS, "replicas": 2, "keep": "all"}


def theta_in_bf16(url: str, t: int) -> torch.Tensor:
    run = read_run(url)
    _, state = state_at(run, model_record(run), t)
    return torch.cat([theta.reshape(-1) for theta in state.thetas]).bfloat16()


@pytest.mark.quick(1)
@pytest.mark.parametrize("where", ["weights/0000000003/", "weights/0000000003/manifest"])
def test_a_committer_that_is_killed_while_it_writes_leaves_a_gap_and_no_wrong_weights(
    tmp_path: Path, where: str
) -> None:
    fleet = Fleet(tmp_path, fleet=BROADCAST)
    verb = "create" if where.endswith("manifest") else "put"
    for slot in ("r00", "r01"):
        fleet.start(slot, die=f"before:{verb}:{where}@1")
    fleet.wait_for(lambda: any(child.exitcode for sessions in fleet.sessions.values() for child in sessions))
    (dead,) = [slot for slot, (child, *_) in fleet.sessions.items() if child.exitcode]
    fleet.start(dead)
    assert all(codes[-1] == 0 for codes in fleet.wait().values())
    assert read_weights(fleet.store, 3) is None
    after = read_weights(fleet.store, 4)
    assert after is not None and not after.parent, "an anchor"
    last = next(follow_weights(fleet.url))
    assert last.step == STEPS
    _, tensors = zip(*last.named_tensors(), strict=True)
    assert torch.equal(torch.cat([t.reshape(-1) for t in tensors]), theta_in_bf16(fleet.url, STEPS))


@pytest.mark.slow
def test_weights_of_each_step_are_those_that_the_audit_computes_also_under_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "a run key that nobody guesses"
    monkeypatch.setenv(KEY, key)
    fleet = Fleet(tmp_path, environ={KEY: key}, fleet=BROADCAST, outer={"fragments": 2})
    fleet.start_all()
    following = follow_weights(fleet.url, until=STEPS, poll_s=0.02)
    seen = {found.step: torch.as_tensor(found.bits.view("int16")).clone() for found in following}
    fleet.wait()
    assert STEPS in seen
    for t, bits in seen.items():
        assert torch.equal(bits.view(torch.bfloat16), theta_in_bf16(fleet.url, t))
    forged = fleet.folder / "run" / layout.weights_key(STEPS)
    forged.write_bytes(forged.read_bytes().replace(b'"changed":', b'"changed":1'))
    late = WeightsFollower(open_signed(fleet.url)).poll()
    assert late is not None and late.step == STEPS - 1, "a manifest without the key's tag is passed over"


def test_a_run_without_the_setting_has_none(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, fleet={**BROADCAST, "broadcast_weights": False, "steps": 2})
    fleet.start_all()
    fleet.wait()
    assert not fleet.store.list(layout.WEIGHTS)


def test_a_lighthouse_has_no_bucket_for_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a run over a lighthouse has no bucket"):
        config(tmp_path, rendezvous="lighthouse://localhost:1234", fleet=BROADCAST, outer={"norm_gate": 0.0})

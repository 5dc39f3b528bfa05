"""The fleet of the studies takes the steps of a real one."""

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from diloco.history import model_record, start_folder, state_at
from diloco.launch import fetch_files, read_run
from diloco.replica import share_of
from diloco.seeds import derive_seed
from inner import Seeds, build_inner
from tests.fleet import Fleet

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "studies"))
from fleet import flat, outer_steps

STEPS = 3


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    found = Fleet(tmp_path_factory.mktemp("real"), fleet={"replicas": 2, "min_replicas": 2, "steps": STEPS})
    found.start_all()
    assert found.wait() == {"r00": [0], "r01": [0]}, found.logs()
    return found


def test_it_has_the_bits_of_a_real_fleet(fleet: Fleet, tmp_path: Path) -> None:
    run = read_run(fleet.url)
    record, outer = model_record(run), run.config.outer
    start = start_folder(run, record, tmp_path / "model")
    files = fetch_files(run, tmp_path / "code")
    seeds = [Seeds(derive_seed(0, s), derive_seed(0, s, 1), 0, share_of(run.config, s)) for s in ("r00", "r01")]
    loops = [build_inner(run.config.inner, start, files, one) for one in seeds]
    thetas = outer_steps(loops, every=outer.sync_every, rate=lambda mean, deltas: float(outer.lr), mu=outer.momentum)
    found = [theta.clone() for theta in islice(thetas, STEPS)]
    thetas.close()
    for t, theta in enumerate(found, 1):
        assert torch.equal(theta, torch.cat(state_at(run, record, t)[1].thetas)), t
    assert not torch.equal(flat(loops[0]), flat(loops[1]))  # each ended where its own inner steps led


def test_an_error_in_a_replica_is_told(fleet: Fleet) -> None:
    class Broken:
        model = torch.nn.Linear(2, 2)

        def train(self, stop: object) -> None:
            raise ValueError("a broken loop")

    with pytest.raises(ValueError, match="a broken loop"):
        next(outer_steps([Broken()], every=2, rate=lambda mean, deltas: 0.7, mu=0.9))  # type: ignore[list-item]

"""A replica of a run whose work is done by Monarch's actors: trainer, generator, self-teacher, two clients of teachers.

    python examples/monarch/replica.py runs/monarch         pip install 'serverless-diloco[local,replay,monarch]'

    this process      claims the slot, writes heartbeats, holds θ and the outer momentum, uses the bucket
    its actors        compute each round from θ_t on; after a kill -9 of any of them the digests stay the same

Two replicas: `--replicas 2 --slot r00` here, `--replicas 2 --slot r01` on another machine that reaches the same bucket.
The teachers are examples/local_teachers.py, served by this process; `--base-url` and `--teacher` name others.

Not promised: the run.json of `diloco train`; `diloco status` can still read the run.
"""

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from diloco import StoreManager, make_diloco
from diloco.replica.replica import share_of
from diloco.run.config import RunConfig, derive_seed, load_config
from examples.local_teachers import serving
from inner import Seeds, Teacher, ToolWorld, publish_model
from inner.extras.monarch import Replica, ReplicaPlan, read_weights, write_weights
from inner.train.build import load_start

CLIENTS = 2  # TeacherReplayActors


def main() -> None:
    given = arguments()
    config = load_config(given.config)
    config = replace(config, fleet=replace(config.fleet, replicas=given.replicas))  # each slot reads its share of rows
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="monarch-")))
        world = ToolWorld(config.inner.toolworld.kinds, config.inner.toolworld.names)
        base_url = given.base_url or stack.enter_context(serving(world))
        publish_model(config.inner, folder / "model")
        plan = make_plan(config, given.slot, folder, [free_teacher(base_url, name) for name in given.teacher])
        train(stack.enter_context(Replica(plan)), config, folder / "model", given)


def make_plan(config: RunConfig, slot: str, folder: Path, teachers: list[Teacher]) -> ReplicaPlan:
    """Return the actors' plan; the order of the data and all noise depend on the slot alone."""
    seeds = Seeds(derive_seed(config.seed, slot), derive_seed(config.seed, slot, "noise"), share=share_of(config, slot))
    return ReplicaPlan(
        config=config.inner.to_dict(),
        model_dir=str(folder / "model"),
        files={kind: str(path) for kind, path in config.user_files().items()},
        seeds=seeds,
        steps=config.outer.sync_every,
        teachers=tuple(teachers),
        max_usd=1.0,
        ledger=str(folder / "ledger"),
        replay_actors=CLIENTS,
    )


def train(replica: Replica, config: RunConfig, model_dir: Path, given: argparse.Namespace) -> None:
    model = load_start(model_dir, config.inner.dtype, config.inner.lora)[0]
    manager = StoreManager(given.run, given.slot, replicas=given.replicas, steps=config.fleet.steps)
    still = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    with make_diloco(model, still, manager, replace(config.outer, sync_every=1)) as loop:
        while not manager.done:
            t = loop.committed()
            ended = replica.run_round(t, read_weights(model), manager.num_participants() or given.replicas)
            write_weights(model, ended.weights)
            loop.log(**ended.numbers)
            still.step()  # without gradients it moves nothing, but it triggers the outer step
            print(f"outer step {t}: reward {ended.numbers['reward']:.3f}, θ {loop.state.digest()}", flush=True)


def free_teacher(base_url: str, name: str) -> Teacher:
    return Teacher(name, 0.0, 0.0, base_url=base_url, key_env=None)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a folder or a bucket")
    parser.add_argument("--slot", default="r00")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("run.toml"))
    parser.add_argument("--base-url", help="an OpenAI-compatible endpoint without a price; default: one of our own")
    parser.add_argument("--teacher", action="append", default=None, help="a model there; may be given again")
    given = parser.parse_args()
    given.teacher = given.teacher or ["expert-0", "expert-1", "expert-2"]
    return given


if __name__ == "__main__":
    main()

"""A Lightning Trainer as a replica: alone it is the script, and of two replicas one may be killed."""

import multiprocessing
import os
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from diloco.process.watchdog import Watchdog
from diloco.run.config import OuterError
from diloco.runlog.reader import read_report
from diloco.runlog.summary import checks
from diloco.script.callback import DiLoCoCallback
from rendezvous.clock import SystemClock
from rendezvous.stores.open import open_store

lightning = pytest.importorskip("lightning")
from lightning.pytorch.callbacks import EarlyStopping  # noqa: E402  # pyright: ignore[reportMissingImports]

from diloco.script.lightning import DiLoCoLightningCallback, refuse_fights  # noqa: E402

torch.set_num_threads(1)
X = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
EPOCHS = SimpleNamespace(interval="epoch", frequency=1)
FINE: dict[str, Any] = {
    "optimizers": [1], "world_size": 1, "precision": "32-true", "global_step": 0, "estimated_stepping_batches": 8,
    "num_training_batches": 8, "lr_scheduler_configs": [EPOCHS], "callbacks": [],
}  # fmt: skip
QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Linear(6, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = (self.body(batch[0])[:, 0] - batch[0].sum(1)).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(folder: Path, callbacks: list[Any], module: Line | None = None, **more: Any) -> tuple[Line, Any]:
    lightning.seed_everything(3, verbose=False)
    module, loader = module or Line(), DataLoader(TensorDataset(X), batch_size=8, shuffle=True)
    settings = {"max_steps": 24, "logger": False, "enable_checkpointing": False, **QUIET, **more}
    trainer = lightning.Trainer(default_root_dir=folder, callbacks=callbacks, **settings)
    trainer.fit(module, loader)
    return module, trainer


def flat(module: Line) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def test_one_replica_with_a_plain_outer_step_is_the_script_alone(tmp_path: Path) -> None:
    alone, _ = fit(tmp_path, [])
    run = f"file://{tmp_path}/run"
    one, trainer = fit(tmp_path, [DiLoCoLightningCallback(run, outer_lr=1.0, outer_momentum=0.0, sync_every=4)])
    assert trainer.global_step == 24 and (flat(one) - flat(alone)).abs().max() <= 1e-6
    report = read_report(open_store(run))
    assert report.head == 6 and report.done and report.of_kind("step")[-1]["train_loss"] > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "16-mixed"}, 'Use "bf16-mixed"'), ({"estimated_stepping_batches": float("inf")}, "has no end"),
        ({"optimizers": [1, 2]}, "2 optimizers"), ({"world_size": 2}, "one for each replica"),
        ({"global_step": 5}, "the bucket is the checkpoint"),
        pytest.param({"callbacks": [EarlyStopping("train_loss")]}, "would end this replica alone", id="early stopping"),
        ({"num_training_batches": float("inf"), "lr_scheduler_configs": [EPOCHS]}, 'Set its interval to "step"'),
    ],
    ids=str,
)  # fmt: skip
def test_what_would_fight_with_the_run_is_refused(settings: dict[str, Any], words: str) -> None:
    trainer = SimpleNamespace(**{**FINE, **settings})
    with pytest.raises(OuterError, match=f"this Trainer cannot be a replica: .*{words}"):
        refuse_fights(trainer, SimpleNamespace(automatic_optimization=True))


def test_ranks_of_which_lightning_knows_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `diloco launch` on two devices, a Trainer with devices=1 has a world of one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    trainer = SimpleNamespace(**FINE)
    with pytest.raises(OuterError, match="cannot be a replica: 2 processes run this script, and each"):
        refuse_fights(trainer, SimpleNamespace(automatic_optimization=True))


class ByEpochs(Line):
    """Its schedule takes a step after each epoch, as Lightning's do by default."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]

    def on_train_epoch_start(self) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def test_a_schedule_of_epochs_is_the_scripts_own(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [DiLoCoLightningCallback(f"file://{tmp_path}/run", sync_every=4)]):
        module = ByEpochs()
        fit(tmp_path, callbacks, module, max_steps=36)
        found.append(module.rates[:3])
    assert found[0] == found[1] == [0.05, 0.025, 0.0125]


class Validated(Line):
    """It is validated on twelve batches after each epoch."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.training_step(batch, index))

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(X), batch_size=8)


class Looks(lightning.Callback):
    """Let half a second pass in each batch of a validation, and twenty in a save, as the heartbeat sees them."""

    def __init__(self, replica: DiLoCoCallback) -> None:
        self.replica, self.looks, self.hung = replica, Counter[str](), list[str]()

    def look(self, what: str, times: int) -> None:
        assert self.replica.loop is not None
        self.looks[what] += 1
        seen = [self.replica.loop.rounds.watchdog.look(0.5) for _ in range(times)]
        self.hung += [what] * any(stood is not None for stood in seen)

    def on_train_start(self, *_: Any) -> None:
        assert self.replica.loop is not None
        self.replica.loop.rounds.watchdog = Watchdog(SystemClock(), least_s=2.0)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self.look("validation", 1)

    def on_save_checkpoint(self, *_: Any) -> None:
        self.look("save", 40)


def test_a_validation_and_a_save_are_no_inner_step_that_hangs(tmp_path: Path) -> None:
    callback = DiLoCoLightningCallback(f"file://{tmp_path}/run", sync_every=4)
    looks = Looks(callback._replica)
    fit(tmp_path, [callback, looks], Validated(), enable_checkpointing=True, num_sanity_val_steps=0)
    assert looks.looks["validation"] >= 24 and looks.looks["save"] and not looks.hung


class Raises(lightning.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 5:
            raise ZeroDivisionError


def test_a_training_that_begins_again_after_it_raised_is_refused(tmp_path: Path) -> None:
    callback = DiLoCoLightningCallback(f"file://{tmp_path}/run", sync_every=4)
    for error in (ZeroDivisionError, OuterError):
        with pytest.raises(error):
            fit(tmp_path, [callback, Raises()])


def live(folder: Path, slot: str) -> None:
    """A process of a person's script, as a launcher starts it."""
    os.environ.update(DILOCO_RUN=f"file://{folder}/run", DILOCO_SLOT=slot, DILOCO_REPLICAS="2")
    module, _ = fit(folder / slot, [DiLoCoLightningCallback(sync_every=4), Slow()], max_steps=48)
    torch.save(flat(module), folder / f"{slot}.pt")


class Slow(lightning.Callback):
    """Leave time for a kill."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.02)


def test_of_two_replicas_one_is_killed_and_one_leaves(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start = [context.Process(target=live, args=(tmp_path, slot)) for slot in ("r00", "r01")]
    for one in start:
        one.start()
    committed(tmp_path, 2)
    assert start[1].pid is not None
    os.kill(start[1].pid, signal.SIGKILL)
    start[1].join()
    again = context.Process(target=live, args=(tmp_path, "r01"))
    again.start()
    committed(tmp_path, 6)
    assert start[0].pid is not None
    os.kill(start[0].pid, signal.SIGTERM)  # as a platform's notice
    start[0].join(120)
    assert start[0].exitcode == 4
    back = context.Process(target=live, args=(tmp_path, "r00"))
    back.start()
    for one in (again, back):
        one.join(120)
        assert one.exitcode == 0
    report = read_report(open_store(f"file://{tmp_path}/run"))
    assert report.done and all(check.ok for check in checks(report)), checks(report)
    assert torch.equal(torch.load(tmp_path / "r00.pt"), torch.load(tmp_path / "r01.pt"))


def committed(folder: Path, step: int) -> None:
    until = time.monotonic() + 120
    store = open_store(f"file://{folder}/run")
    while store.get(f"steps/{step:010d}/commit.json") is None:
        assert time.monotonic() < until
        time.sleep(0.02)

# pyright: reportMissingImports=false
"""One line makes a Lightning Trainer a replica of a run.   pip install 'serverless-diloco[lightning]'

    Trainer(max_steps=200, callbacks=[DiLoCoLightningCallback(sync_every=20)])

    on_train_start       join: model ← θ ─▶ own rows, own seed, rates by the run's step       (all by DiLoCoCallback)
    on_train_batch_end   metrics ─▶ the run's log; stop when the run is done, or this replica was asked to leave
    on_train_end         leave; a replica that leaves early ends its script here

Frozen weights and buffers (batch norm) stay each replica's own.  Not promised: several optimizers; schedulers that are
not functions of the step; `reload_dataloaders_every_n_epochs`; `diloco export` (use the module's state).
"""

import os
import signal
import warnings
from math import isinf
from typing import Any

from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping

from diloco.outer.ranks.group import launched_ranks
from diloco.process.signals import asking_signals
from diloco.run.config import OuterError
from diloco.script.callback import ALONE, EARLY, DiLoCoCallback, total_steps
from diloco.script.rows import used_batches
from rendezvous.layout import slot_index


class DiLoCoLightningCallback(Callback):
    """Make a Lightning Trainer a replica.   The arguments are DiLoCoCallback's."""

    def __init__(
        self, run: str | None = None, slot: str | None = None, replicas: int | None = None, **outer: Any
    ) -> None:
        self._replica = DiLoCoCallback(run, slot, replicas, **outer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self._replica.run:
            return warnings.warn(ALONE, stacklevel=2)
        refuse_fights(trainer, pl_module)
        for number, handler in trainer._signal_connector._original_handlers.items():
            if number in asking_signals():  # Lightning's own handler would raise inside this round
                signal.signal(number, handler or signal.SIG_DFL)
        replica, loader, plan = self._replica, trainer.train_dataloader, trainer.estimated_stepping_batches
        steps = replica.join(pl_module, trainer.optimizers[0], loader, lambda n: total_steps(trainer, plan, n))
        assert replica.loop is not None
        if slot_index(replica.slot):
            trainer.loggers = []
            trainer.callbacks = [one for one in trainer.callbacks if not isinstance(one, Checkpoint)]
        used = used_batches(loader, replica.loop.position(), trainer.accumulate_grad_batches)
        schedulers = {config.scheduler: steps_each(trainer, config) for config in trainer.lr_scheduler_configs}
        replica.begin_at(used, int(os.environ.get("PL_GLOBAL_SEED", "0")), loader, schedulers, plan, steps)
        if used or replica.replicas > 1 or slot_index(replica.slot):
            iter(trainer.fit_loop._data_fetcher)  # the fetcher was made before the rows were divided among replicas
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1  # the run ends the training

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        replica = self._replica
        if replica.loop is None or replica.manager is None:
            return
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        replica.on_log(None, None, None, logs=metrics)
        if replica.asked_to_go or replica.manager.done:
            trainer.should_stop = True

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        self._replica.watch()

    on_validation_end = on_validation_batch_end

    def on_save_checkpoint(self, *_: Any) -> None:
        self._replica.watch(saves=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._replica.on_train_end(None, None, None)


def refuse_fights(trainer: Any, module: Any) -> None:
    """Raise OuterError for a Trainer that would overwrite θ, skip steps, or never end."""
    reasons = {
        f"it has {len(trainer.optimizers)} optimizers. Use exactly one": len(trainer.optimizers) != 1,
        "automatic_optimization = False: the module steps its optimizer. Set it to True": (
            not module.automatic_optimization
        ),
        f"{trainer.world_size} processes train it together. Start one for each replica": trainer.world_size > 1,
        f"{launched_ranks()} processes run this script, and each Lightning Trainer would train alone. Start one "
        "for each replica (one device)": launched_ranks() > 1,
        'precision = "16-mixed" skips steps. Use "bf16-mixed"': trainer.precision == "16-mixed",
        "ckpt_path would replace θ: the bucket is the checkpoint. Leave it out": trainer.global_step > 0,
        f"EarlyStopping {EARLY}": any(isinstance(one, EarlyStopping) for one in trainer.callbacks),
        "it has no end. Set max_steps or max_epochs": trainer.estimated_stepping_batches == float("inf"),
        'a schedule takes a step after each epoch, and the dataset has no length. Set its interval to "step"': any(
            config.interval == "epoch" and isinf(trainer.num_training_batches)
            for config in trainer.lr_scheduler_configs
        ),
    }
    for text, holds in reasons.items():
        if holds:
            raise OuterError(f"this Trainer cannot be a replica: {text}")


def steps_each(trainer: Any, config: Any) -> int:
    """Return the optimizer steps per step of a scheduler: by default Lightning steps after each epoch."""
    in_epoch = -(-trainer.num_training_batches // trainer.accumulate_grad_batches)
    return config.frequency * (in_epoch if config.interval == "epoch" else 1)

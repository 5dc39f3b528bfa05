"""One line makes a trainer of Transformers or TRL a replica of a run.

    trainer = GRPOTrainer(…, callbacks=[DiLoCoCallback("s3://bucket/run", slot="r00", replicas=4, sync_every=20)])

    on_train_begin   refuse settings that would change θ ─▶ join: model ← θ ─▶ own rows, own seed, lr by the run's step
    optimizer.step   make_diloco's hooks: every H steps, upload Δ and apply the mean
    on_step_end      stop when the run is done, or when this replica was asked to leave
    on_train_end     leave; a replica that leaves early ends its script here (SystemExit, exit code 4)

If no run is given, here or in DILOCO_RUN, the script trains as if it had no callback, and warns once.
max_steps counts the steps of one replica, as with accelerate. In an epoch, each replica reads its share of the rows.

Under torchrun or accelerate launch, each rank runs the script, and rank 0 joins for all (diloco/outer/ranks/).

Not promised: callbacks that step the optimizer themselves; a pace that leaves out evaluations inside the training;
detection of a save that hangs.
"""

import atexit
import math
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from diloco.model.script_model import publish_script_model
from diloco.outer.loop import TAKEN, OuterLoop
from diloco.outer.make import make_diloco, outer_config
from diloco.outer.managers.manager import StoreManager
from diloco.outer.ranks.lead import lead, tell
from diloco.process import exitcodes
from diloco.process.session import Session
from diloco.process.signals import asking_signals, hear_asking
from diloco.run.config import OuterError
from diloco.run.library import AUTO, LAUNCHED, first_replicas, one_spelling, refuse_second
from diloco.run.script import REPLICAS, SLOT, URL
from diloco.script.rollouts import calling_trainer, log_rollouts
from diloco.script.rows import give_share, refuse_small_share, skip_used, unshared_words, used_batches
from inner.data.order import Share
from rendezvous.agreement.membership import read_control
from rendezvous.errors import Leaving
from rendezvous.layout import is_slot, slot_index, slot_name

if TYPE_CHECKING:
    from diloco.outer.ranks.led import Led

ALONE = f"DiLoCoCallback: no run is named, neither here nor in {URL}, so this script trains alone"
BEGUN_TWICE = (
    "the training began again after an error, while the training that failed still holds its slot in the run. Let the "
    "error end the script, and start the script again: it continues at the run's position. In a notebook, first make "
    "the trainer and its callback again"
)
ABSENT_S = 300.0  # time for the other ranks of this replica: a trainer has just placed the model on all of them
EARLY = (
    "would end this replica alone, and its supervisor would start it again. Leave it out: `diloco stop` ends a run, "
    "and `diloco export RUN --step T` takes any step"
)
LOGGED = {"reward": "reward", "loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}


class DiLoCoCallback(TrainerCallback):
    """Make a trainer a replica.   run: a URL.   slot: "r00", …, or "auto".   replicas: how many a new run starts with.

    Environment variables replace missing arguments.   outer: settings of make_diloco, for example sync_every.
    """

    def __init__(
        self, run: str | None = None, slot: str | None = None, replicas: int | None = None, **outer: Any
    ) -> None:
        refuse_other_names(run, slot)
        self.run = run or os.environ.get(URL, "")
        self.slot = os.environ.get(SLOT) or slot or slot_name(0)
        self.replicas = replicas or replicas_of(os.environ.get(REPLICAS, "1"))
        self.outer = outer
        self.manager: StoreManager | Led | None = None
        self.loop: OuterLoop | None = None
        self.asked_to_go = self._stepped = False
        self._skipping: Any = None  # a loader, in its first pass, whose first batches this slot has used
        self._handlers: dict[int, Any] = {}
        self._on_join: Callable[[Session | None, Callable[[Any], Any]], object] = lambda session, tell: None
        if self.slot != AUTO and not is_slot(self.slot):
            raise OuterError(
                f'slot = {self.slot!r} (or {SLOT}) is not the name of a slot. Use "r00", "r01", …, or "{AUTO}"'
            )

    # ---------------------------------------------------------------- the trainer's events

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the trackers, except in r00, before one of them starts a run."""
        if self.run and self.slot != slot_name(0):
            speak_for_one(args, calling_trainer())

    def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        if not self.run:
            return warnings.warn(ALONE, stacklevel=2)
        caller = calling_trainer()
        refuse_flat_shards(trainer["model"])
        refuse_fights(args, state, [type(one) for one in caller.callback_handler.callbacks] if caller else [])
        self._on_join = lambda session, tell: publish_script_model(
            session, trainer["model"], trainer.get("processing_class"), tell
        )
        optimizer = getattr(trainer["optimizer"], "optimizer", trainer["optimizer"])
        plan, planned = state.max_steps, lambda replicas: total_steps(args, state.max_steps, replicas)
        loader, boundary = trainer["train_dataloader"], generation_steps(args)
        most = most_steps(args, state, loader)
        state.max_steps = self.join(trainer["model"], optimizer, loader, planned, boundary=boundary, most=most)
        if slot_index(self.slot) and (late := speak_for_one(args, caller)):
            warnings.warn(
                f"{', '.join(late)} has begun a run for {self.slot}, because DiLoCoCallback was added when the trainer "
                "was there already. Give it to the trainer's callbacks=[…], so that only r00 uses trackers",
                stacklevel=2,
            )
        assert self.manager is not None and self.loop is not None
        if self.manager.session is not None:
            log_rollouts(caller, self.manager, self.manager.session)
        move_to(state, self.loop.position(), caller)
        used = used_batches(loader, state.global_step, args.gradient_accumulation_steps)
        self.begin_at(used, args.data_seed or args.seed, loader, {trainer["lr_scheduler"]: 1}, plan, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.manager is None or self.loop is None:
            return
        if not self._stepped:
            raise OuterError(
                "the optimizer that train() began with did not make this step, so the run would not see it. Give the "
                "trainer its optimizer before train(), and let no other callback replace it"
            )
        self._stepped = False
        ended = state.global_step >= state.max_steps  # the training's end, by the trainer's count
        move_to(state, self.loop.position(), calling_trainer())
        if self.asked_to_go or self.manager.done:
            control.should_training_stop = True
        elif ended and state.global_step < state.max_steps:  # a round was lost; this replica repeats it
            control.should_training_stop = False
        self.watch(saves=control.should_save)

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.watch()

    on_save = on_prediction_step

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.watch(saves=control.should_save or args.save_strategy == "best")

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        loader, self._skipping = self._skipping, None
        if loader is not None and self.loop is not None:
            if self.loop.position() * args.gradient_accumulation_steps == loader.skip_batches:
                control.should_training_stop = False  # all rows of this pass were skipped; train on the next pass
            loader.skip_batches = 0
        self.watch(saves=control.should_save)

    def watch(self, saves: bool = False) -> None:
        """Tell the watchdog that the trainer continues: it times each step of an evaluation, but not a save.

        saves: the trainer saves next, which may take any time."""
        if self.loop is not None and saves:
            self.loop.rounds.watchdog.rest()
        elif self.loop is not None:
            self.loop.rounds.watchdog.resume()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if self.loop is None or "train_runtime" in (logs or {}):
            return
        told = {k: v for k, v in (logs or {}).items() if isinstance(v, int | float) and not isinstance(v, bool)}
        numbers = {LOGGED.get(name, name): value for name, value in told.items()}
        self.loop.log(**{name: value for name, value in numbers.items() if name not in TAKEN and name != "epoch"})

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.loop is None or self.manager is None:
            return
        loop, self.loop = self.loop, None
        atexit.unregister(self._leave_after_error)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        early = self.asked_to_go and not self.manager.done
        loop.__exit__(Leaving if early else None, None, None)
        if not early:
            return
        if self.manager.session is not None:
            print(f"{self.slot}: left the run after outer step {loop.committed()}; its work is in the bucket")
        raise SystemExit(exitcodes.LEFT)

    # ---------------------------------------------------------------- joining and leaving

    def join(
        self,
        model: Any,
        optimizer: Any,
        loader: Any,
        planned: Callable[[int], int],
        *,
        boundary: int = 1,
        most: float = math.inf,
    ) -> int:
        """Join the run. Return one replica's optimizer steps.   planned: number of replicas -> the trainer's steps.

        boundary: optimizer steps that no sync interrupts.   most: optimizer steps in all epochs of the trainer."""
        if self.loop is not None:
            raise OuterError(BEGUN_TWICE)
        outer = outer_config(self.outer)
        steps = 0

        def claim() -> StoreManager:
            nonlocal steps
            refuse_second(self.run)
            self.replicas = first_replicas(self.run) or self.replicas
            refuse_small_share(loader, self.replicas)
            steps = rounds_of(planned(self.replicas), outer.interval, most)
            manager = StoreManager(self.run, self.slot, replicas=self.replicas, steps=steps)
            self.slot = manager.session.rv.slot
            steps = read_control(manager.session.rv.store).steps or steps  # the operator's number wins
            return manager

        self.manager = manager = lead(claim, ABSENT_S)
        self.replicas, self.slot, steps = tell(manager, (self.replicas, self.slot, steps))
        self.loop = make_diloco(model, optimizer, manager, outer, boundary=boundary).__enter__()
        if tell(manager, one_spelling(self.run) in LAUNCHED):  # only rank 0 knows this
            self._on_join(manager.session, partial(tell, manager))  # for `diloco export`
        elif manager.session is not None:  # a launched replica's process reports its end itself
            atexit.register(self._leave_after_error)
        self._catch_leaving(optimizer)
        self._listen()
        return steps * outer.interval

    def begin_at(
        self, used: int, seed: int, loader: Any, schedulers: Mapping[Any, int], planned: int, steps: int
    ) -> None:
        """Set rows, seed and learning rates to the run's position.   used: batches that the slot has read.

        schedulers: scheduler -> optimizer steps per scheduler step.   planned: optimizer steps of the trainer's plan.
        steps: optimizer steps of one replica."""
        assert self.loop is not None and self.manager is not None
        slot = slot_index(self.slot)
        turn, index = divmod(slot, self.replicas)  # a slot beyond the first replicas deals the rows in another order
        share = Share(tell(self.manager, seed) + turn, index, self.replicas)  # ranks may have seeds of their own
        is_alone = self.replicas == 1 and not slot
        if not give_share(loader, share, used, is_alone=is_alone):
            self._skipping = loader if skip_used(loader, used) else None
            if words := unshared_words(loader, is_alone=is_alone, begins_again=used > 0 and self._skipping is None):
                warnings.warn(f"{self.slot}: {words}", stacklevel=2)
        if slot or used:
            noise = hash((torch.initial_seed(), slot, used)) % 2**32
            random.seed(noise), np.random.seed(noise), torch.manual_seed(noise)
        for scheduler, each in schedulers.items():
            follow_run(scheduler, self.loop.position, planned, steps, each)

    def _catch_leaving(self, optimizer: torch.optim.Optimizer) -> None:
        """Note each step. If this replica was asked to leave, the step raises Leaving; the trainer then stops."""
        inner = optimizer.step

        def step(*args: Any, **options: Any) -> Any:
            self._stepped = True
            try:
                return inner(*args, **options)
            except Leaving:
                self.asked_to_go = True
                if self.loop is not None and self.manager is not None and self.manager.done:
                    self.loop.rewrite_all()  # before the trainer saves or evaluates

        optimizer.step = step  # type: ignore[method-assign]

    def _listen(self) -> None:
        """Offer this round's work and leave if a signal asks for it. A signal handler of the script stays."""
        if threading.current_thread() is not threading.main_thread() or self.manager is None:
            return
        manager = self.manager
        free = [number for number in asking_signals() if signal.getsignal(number) is signal.SIG_DFL]
        self._handlers |= hear_asking(lambda: manager.ask_to_leave("got a signal to end"), free)

    def _leave_after_error(self) -> None:
        """Log the trainer's error in the run, because on_train_end was not called."""
        if self.loop is None or self.manager is None or self.manager.session is None:
            return
        error = getattr(sys, "last_value", None)
        text = f"{type(error).__name__}: {error}" if error is not None else "the script ended inside its training"
        self.manager.session.emit("crashed", error=text)
        self.manager.session.flush()
        self.loop.__exit__(RuntimeError, error, None)


# -------------------------------------------------------------------- what would fight with the run


def refuse_other_names(run: str | None, slot: str | None) -> None:
    """Raise OuterError if the script names another run or slot than its environment, which `diloco launch` sets."""
    for name, asked, variable in (("run", run, URL), ("slot", slot, SLOT)):
        stands = os.environ.get(variable)
        if asked and stands and asked not in (stands, AUTO):
            raise OuterError(
                f'DiLoCoCallback has {name} = "{asked}", and {variable} is "{stands}", as `diloco launch` sets it for '
                f"each replica. Leave {name} out of DiLoCoCallback, or unset {variable}"
            )


def replicas_of(text: str) -> int:
    """Return the number of replicas in an environment variable's text."""
    if not text.isdecimal() or int(text) < 1:
        raise OuterError(f"{REPLICAS} = {text!r} is not a number of replicas. Set it to 4, for example")
    return int(text)


def refuse_fights(args: Any, state: Any, callbacks: Sequence[type]) -> None:
    """Raise OuterError for settings with which a trainer cannot be a replica: they would overwrite θ or skip steps."""
    reasons = {
        "it has two DiLoCoCallbacks, and each would average. Leave one out": callbacks.count(DiLoCoCallback) > 1,
        "fp16 (its own, or its launcher's mixed_precision) scales gradients and skips steps, so replicas would count "
        "differently. Use bf16 = True": args.fp16 or getattr(args, "mixed_precision", "") == "fp16",
        "load_best_model_at_end would replace θ after the run. `diloco export RUN --step T` takes any step": (
            args.load_best_model_at_end
        ),
        f"EarlyStoppingCallback {EARLY}": any(issubclass(one, EarlyStoppingCallback) for one in callbacks),
        "auto_find_batch_size = True begins the training again, with smaller batches, if memory is short. Set "
        "per_device_train_batch_size": args.auto_find_batch_size,
        "DeepSpeed keeps its own copy of the weights. Use FSDP2 (fsdp = True)": args.deepspeed,
        'this is FSDP 1, whose parameters are flat. Use fsdp_config = {"version": 2}': (
            args.fsdp and int((args.fsdp_config or {}).get("version", 2)) != 2
        ),
        "resume_from_checkpoint would replace θ: the bucket is the checkpoint. Leave it out": state.global_step > 0,
    }
    for text, holds in reasons.items():
        if holds:
            raise OuterError(f"this trainer cannot be a replica: {text}")


def refuse_flat_shards(model: Any) -> None:
    """Raise OuterError for FSDP 1, which `accelerate launch` may select although the trainer's settings do not."""
    if type(model).__name__ == "FullyShardedDataParallel":
        raise OuterError(
            "this trainer cannot be a replica: accelerate uses FSDP 1, whose parameters are flat. Set fsdp_version: 2 "
            "in accelerate's config"
        )


def generation_steps(args: Any) -> int:
    """Return how many optimizer steps use one batch of rollouts (GRPO). No sync interrupts them."""
    micro = (getattr(args, "steps_per_generation", None) or 1) * (getattr(args, "num_iterations", None) or 1)
    return max(1, micro // args.gradient_accumulation_steps)


def total_steps(args: Any, planned: int, replicas: int) -> int:
    """Return the optimizer steps of one replica.   planned: max_steps, or steps for epochs of all rows."""
    return planned if args.max_steps > 0 else max(1, -(-planned // replicas))


def most_steps(args: Any, state: Any, loader: Any) -> float:
    """Return the optimizer steps in all epochs of the trainer, which then ends; ∞ for a dataset without a length."""
    try:
        in_epoch = max(1, -(-len(loader) // args.gradient_accumulation_steps))
    except TypeError:
        return math.inf
    return state.num_train_epochs * in_epoch


def rounds_of(steps: int, interval: int, most: float = math.inf) -> int:
    """Return the number of outer steps in `steps` optimizer steps; a short last round is filled up if `most` allows it.

    interval: optimizer steps between two outer steps.   most: the largest number of optimizer steps."""
    if steps < interval:
        raise OuterError(
            f"{steps} optimizer steps are fewer than one round of {interval}, so nothing would be averaged. Use more "
            f"steps (max_steps, or epochs), or sync_every = {max(1, steps // 4)}"
        )
    rounds = -(-steps // interval)
    return rounds if rounds * interval <= most else rounds - 1


def speak_for_one(args: Any, trainer: Any) -> list[str]:
    """Turn off trackers, checkpoints and the Hub, except in the first replica.   Return the trackers' names."""
    args.push_to_hub, args.save_strategy = False, "no"
    if trainer is not None:
        trainer.push_to_hub = lambda *_, **__: print("push_to_hub is left to the run's first replica")
    if (handler := getattr(trainer, "callback_handler", None)) is None:
        return []
    found = [one for one in handler.callbacks if "transformers.integrations" in type(one).__module__]
    handler.callbacks = [one for one in handler.callbacks if one not in found]
    return [type(one).__name__ for one in found]


# -------------------------------------------------------------------- where the run is


def follow_run(scheduler: Any, at: Callable[[], int], planned: int, steps: int, each: int = 1) -> None:
    """Make a schedule over `planned` optimizer steps a function of the run's position.   steps: a replica's.

    each: optimizer steps of the trainer per step of the scheduler."""
    lambdas = getattr(scheduler, "lr_lambdas", None)
    if lambdas is None:
        return warnings.warn(restarts(scheduler, planned // each, steps // each), stacklevel=2)
    scheduled = lambda: round(at() * planned / steps) // each  # noqa: E731
    scheduler.lr_lambdas = [lambda _, rate=rate: rate(scheduled()) for rate in lambdas]
    for group, base, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, lambdas, strict=True):
        group["lr"] = base * rate(scheduled())


def restarts(scheduler: Any, planned: int, steps: int) -> str:
    """Return the warning about a schedule that cannot follow the run.   planned, steps: the scheduler's."""
    ends = f", and the run ends after {steps} of its {planned} steps. Give it {steps} (T_max, total_steps)"
    return (
        f"{type(scheduler).__name__} is not a function of the step alone, so a replaced replica restarts it"
        f"{ends if steps < planned else ''}. A LambdaLR follows the run"
    )


def move_to(state: Any, step: int, trainer: Any) -> None:
    """Set the trainer's step. After a jump, the trainer's means (loss) are still over the steps that were taken."""
    jump, state.global_step = step - state.global_step, step
    for since in ("_globalstep_last_logged", "_initial_global_step"):
        if jump and hasattr(trainer, since):
            setattr(trainer, since, getattr(trainer, since) + jump)

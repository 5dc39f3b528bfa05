"""A replica that dies, or sleeps, at a named store call: the fault points of real processes.

die = "after:put:/delta/@3"        kill -9 itself right after the put of a key with "/delta/" for the 3rd time
when: before | after      verb: put | create
die = "hang:3"                     the 3rd inner step never ends
die = "fail:ENOSPC:10@3.0"         from the 10th write on, writes fail with that error for 3 seconds
die = "full:inner-"                there is no space for a temporary folder of that prefix
"""

import errno
import json
import os
import signal
import tempfile
import time
from dataclasses import replace
from typing import Any

import numpy as np

from diloco.process.watchdog import Watchdog
from diloco.run import config
from diloco.run.config import FleetConfig
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.stores.files import FileStore
from rendezvous.stores.open import open_store


def arm(spec: str, store: type[Any] = FileStore) -> None:
    """Make this process kill itself at the call of `store` that `spec` names."""
    if spec.startswith("hang:"):
        return _hang(int(spec.removeprefix("hang:")))
    if spec.startswith("full:"):
        return _refuse_folder(spec.removeprefix("full:"))
    when, verb, rest = spec.split(":")
    if when == "fail":
        return _fail(getattr(errno, verb), *rest.split("@"))
    pattern, _, nth = rest.partition("@")
    original, seen = getattr(store, verb), [0]

    def die_at_nth(key: str) -> None:
        seen[0] += pattern in key
        if pattern in key and seen[0] == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)

    def call(self: Any, key: str, body: Any) -> None:
        if when == "before":
            die_at_nth(key)
        original(self, key, body)
        if when == "after":  # a create that another replica won raises: it is not counted
            die_at_nth(key)

    setattr(store, verb, call)


def _hang(nth: int) -> None:
    original, begun = Watchdog.resume, [0]

    def resume(self: Watchdog) -> None:
        original(self)
        begun[0] += 1
        while begun[0] == nth:
            time.sleep(0.05)

    Watchdog.resume = resume


def _fail(code: int, nth: str, seconds: str) -> None:
    original, seen, since = tempfile.mkstemp, [0], [0.0]

    def mkstemp(*args: Any, **kwargs: Any) -> tuple[int, str]:
        seen[0] += 1
        if seen[0] >= int(nth):
            since[0] = since[0] or time.monotonic()
            if time.monotonic() - since[0] < float(seconds):
                raise OSError(code, os.strerror(code))
        return original(*args, **kwargs)

    tempfile.mkstemp = mkstemp  # the file store's way to write anything


def _refuse_folder(prefix: str) -> None:
    original = tempfile.mkdtemp

    def mkdtemp(suffix: Any = None, given: Any = None, dir: Any = None) -> str:
        if given == prefix:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"{tempfile.gettempdir()}/{prefix}")
        return original(suffix, given, dir)

    tempfile.mkdtemp = mkdtemp


def _poison(factor: float) -> None:
    """Every pseudogradient is `factor` times too long."""
    original = Rendezvous.offer

    def offer(self: Rendezvous, delta: np.ndarray, *args: Any, **kwargs: Any) -> None:
        original(self, np.multiply(delta, np.float32(factor), out=delta), *args, **kwargs)

    Rendezvous.offer = offer


def _learn_nothing(steps: set[int]) -> None:
    """The pseudogradients of these outer steps are zero, 0 and −0."""
    original = Rendezvous.offer

    def offer(self: Rendezvous, delta: np.ndarray, *args: Any, **kwargs: Any) -> None:
        original(self, np.multiply(delta, np.float32(self.step not in steps), out=delta), *args, **kwargs)

    Rendezvous.offer = offer


def _note_deltas(folder: str) -> None:
    """Keep every pseudogradient that is offered, before any codec sees it."""
    original = Rendezvous.offer

    def offer(self: Rendezvous, delta: np.ndarray, *args: Any, **kwargs: Any) -> None:
        np.save(f"{folder}/delta.{self.name}.{self.step}.npy", delta)
        original(self, delta, *args, **kwargs)

    Rendezvous.offer = offer


def _note_lessons(folder: str) -> None:
    """For every lesson of every loss: is it about the tokens that the rollout in TRL's batch has there?"""
    from inner.train.trainer import LESSONS, ComposerReplicationTrainer

    original = ComposerReplicationTrainer._sdpo_loss

    def sdpo_loss(self: Any, caught: Any, inputs: Any) -> Any:
        with open(f"{folder}/lessons.{os.getpid()}.jsonl", "a") as file:
            for row, lessons in enumerate(inputs[LESSONS]):
                ids = inputs["completion_ids"][row].tolist()
                prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
                for lesson in lessons:
                    turn = ids[lesson.start : lesson.end]
                    aligned = bool(turn) and lesson.teacher_ids[-len(turn) :] == turn
                    start = 4 * len(prompt) // 5  # the hint stands before the assistant's opening
                    aligned &= lesson.teacher_ids[:start] == prompt[:start]
                    aligned &= len(lesson.teacher_ids) > len(prompt + turn)
                    whole = bool(inputs["completion_mask"][row, lesson.end - 1])  # the student sees its own turn
                    truncated = not inputs["tool_mask"][row].any()
                    file.write(json.dumps({"aligned": aligned, "whole": whole, "truncated": truncated}) + "\n")
        return original(self, caught, inputs)

    ComposerReplicationTrainer._sdpo_loss = sdpo_loss


def replica(url: str, slot: str, log: str, die: str = "", environ: dict[str, str] | None = None) -> None:
    """Entry point of a child process: diloco.replica.replica with its output in a file."""
    os.environ.update(environ or {})
    tempfile.tempdir = None  # the fork server has asked before TMPDIR was set
    if os.environ.get("TEST_ONE_DISK"):  # elsewhere there is no room either
        tempfile._candidate_tempdir_list = lambda: [os.environ["TMPDIR"]]  # type: ignore[attr-defined]
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    if die:
        arm(die, type(open_store(url)))
    if patience := os.environ.get("TEST_STORE_PATIENCE"):
        short = Timing(store_patience=float(patience), give_up=float(patience))
        FleetConfig.timing = property(lambda self: short)  # type: ignore[assignment]
    if os.environ.get("TEST_SHARDED"):
        config.Rules = lambda **k: replace(Rules(**k), shard_from=1, shard_elements=1 << 12)  # type: ignore
    if folder := os.environ.get("TEST_NOTE_DELTAS"):
        _note_deltas(folder)
    if empty := os.environ.get("TEST_EMPTY"):
        _learn_nothing({int(step) for step in empty.split(",")})
    if factor := os.environ.get("TEST_POISON"):
        _poison(float(factor))
    import torch

    torch.set_num_threads(1)
    if folder := os.environ.get("TEST_NOTE_LESSONS"):
        _note_lessons(folder)
    if os.environ.get("TEST_SCRIPTED"):
        from tests.support.scripted import scripted

        script = scripted()  # kept until this process ends
        script.__enter__()
    from diloco.replica import main, replica

    if os.environ.get("TEST_SHARD"):
        from tests.support.ranks import let_accelerate_shard

        let_accelerate_shard()
    if os.environ.get("TEST_ONE_SEED"):
        replica.derive_seed = lambda *parts: 1
    devices = os.environ.get("TEST_DEVICES", "1")
    os._exit(main([url, "--slot", slot, "--devices", devices]))

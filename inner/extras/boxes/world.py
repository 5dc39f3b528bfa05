"""A Harbor task as an environment for TRL: a box per rollout; its tools are bash, read, write, submit.

    Harbor = harbor_environment("e2b")     the environment of a run with boxes = "e2b"; or, with changes, in your file

    row["harbor"] ──reset──▶ box with the task's files ── bash read write ──▶ … ── submit, or the last turn
                                                                                        │
                                                               get_reward ──▶ a number, AtMostWorst or None (episode.py)

A box belongs to (run, slot, generation, place). The environment's session gives run, slot and generation;
without a session, the run is "alone-" and a random name. The place names this process, this instance and its episode.

Not promised: that an episode continues after its box died: a dead box is never replaced. A verdict runs the episode's
commands again, in a fresh box.
"""

import itertools
import os
import shlex
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from inner.extras.boxes.box import Box, BoxGone, BoxOwner, ProviderFailed, with_variables
from inner.extras.boxes.episode import Episode
from inner.extras.boxes.starting import BoxStarter, OpenedLater
from inner.host import Host
from inner.tasks.harbor import load_harbor

GONE, OVER = "the box is gone", "the episode is over"
PREDECESSORS = 3  # how many earlier generations of its slot a session cleans up
MOST_READ = 8192  # characters that `read` shows
_numbers = itertools.count()


class _Shared:
    """The BoxStarter that all instances share.   provider: a name, or a BoxStarter.   options: for the provider."""

    def __init__(self, provider: str | BoxStarter, options: Mapping[str, Any]) -> None:
        self._provider, self._options = provider, options
        self._lock = threading.Lock()
        self.told = set[str]()  # what was logged: an event, or an event and a task; errors since the last new box

    @property
    def starter(self) -> BoxStarter:
        """Return the BoxStarter, made at the first call."""
        with self._lock:
            if isinstance(self._provider, str):
                self._provider = BoxStarter(OpenedLater(self._provider, self._options))
            return self._provider


class HarborEnvironment:
    """One episode at a time. All names but tools, reset and get_reward begin with _: TRL uses the others as tools."""

    _shared: "_Shared"
    _session = (f"alone-{uuid.uuid4().hex[:12]}", "0", 0)  # run, slot, generation
    _host: Host | None = None
    _command_s = 60.0  # seconds for one command of the model
    _user = "user"

    def __init__(self) -> None:
        self._place = f"{os.getpid()}-{next(_numbers)}"
        self._episode = 0
        self._now: Episode | None = None

    @property
    def _starter(self) -> BoxStarter:
        return self._shared.starter

    @classmethod
    def _report_to(cls, host: Host) -> None:
        """Take run, slot and generation from the session, and stop boxes that its last predecessors left."""
        cls._session = run, slot, generation = host.owner
        cls._host = host
        cls._shared.starter.on_used = host.rented
        for before in range(max(1, generation - PREDECESSORS), generation):
            with suppress(ProviderFailed):  # a box that does not stop now ends at its time to live
                cls._shared.starter.sweep({"run": run, "slot": slot, "generation": str(before)})

    def reset(self, harbor: str, **row: Any) -> None:
        """Begin the task of this row in a box of its own."""
        self._end()
        self._episode += 1
        owner = BoxOwner(*self._session, f"{self._place}-{self._episode}")
        self._now = Episode(self._starter, owner, load_harbor(harbor), self._tell)
        if self._now.begin():
            self._shared.told.discard("boxes_failed")

    def bash(self, command: str) -> str:
        """Run a shell command in the box.

        Args:
            command: the command, for bash
        """
        limit = min(self._command_s, max(1.0, self._begun.left_s()))
        command = with_variables(self._begun.task.env, command)
        ran = self._act(lambda box: box.exec(command, user=self._user, timeout_s=limit))
        if isinstance(ran, str):
            return ran
        if ran.timed_out:
            return f"{ran.output}\n[time limit of {limit:g} s: exit code {ran.code}]"
        return ran.output if ran.code == 0 else f"{ran.output}\n[exit code {ran.code}]"

    def read(self, path: str) -> str:
        """Read a text file of the box.

        Args:
            path: its path, absolute or from the working folder
        """
        shown = f"head -c {MOST_READ} -- {shlex.quote(path)}"
        return self.bash(shown)

    def write(self, path: str, text: str) -> str:
        """Write a whole text file in the box.

        Args:
            path: its path, absolute or from the working folder
            text: its new content
        """
        place = shlex.quote(path)
        done = self.bash(f'mkdir -p "$(dirname -- {place})" && printf %s {shlex.quote(text)} > {place}')
        return done or f"{path}: {len(text)} characters"

    def submit(self) -> str:
        """Say that the task is done. Later calls do nothing."""
        self._begun.submitted = True
        return "submitted"

    def get_reward(self) -> float | None:
        """Return the verifier's number; None if the provider lost the box.   The box ends."""
        found = self._begun.reward()
        self._tell_used()
        return found

    @property
    def _begun(self) -> Episode:
        assert self._now is not None, "TRL resets an environment before it calls anything else"
        return self._now

    def _act(self, run: Callable[[Box], Any]) -> Any:
        now = self._begun
        if now.is_gone:
            return GONE
        if now.submitted or now.left_s() <= 0:
            return OVER
        try:
            return now.act(run)
        except BoxGone:
            return GONE

    def _end(self) -> None:
        if self._now is not None:
            self._now.end()
            self._tell_used()

    def _tell(self, event: str, text: str) -> None:
        """Log "boxes_failed" once until the provider gives a box again, and any other event once per task."""
        key = event if event == "boxes_failed" else f"{event} {self._begun.task.name}"
        if self._host is not None and key not in self._shared.told:
            self._shared.told.add(key)
            self._host.emit(event, text)

    def _tell_used(self) -> None:
        """Log an event about the boxes of a batch, once the batch's last box has ended."""
        if self._host is None or (used := self._starter.take_used()) is None:
            return
        text = f"{used.boxes} boxes, {used.seconds:.0f} box-seconds"
        price = self._starter.provider.price_per_hour  # it depends on the provider's options, which are not in run.toml
        self._host.emit("boxes_used", text, boxes=used.boxes, box_s=used.seconds, usd_per_hour=price)


def harbor_environment(
    provider: str | BoxStarter,
    *,
    command_s: float = HarborEnvironment._command_s,
    user: str = HarborEnvironment._user,
    options: Mapping[str, Any] | None = None,
) -> type[HarborEnvironment]:
    """Return an environment class whose instances share one BoxStarter, made at the first box.

    options: arguments of the provider's constructor."""
    told = {"_shared": _Shared(provider, options or {}), "_command_s": command_s, "_user": user}
    return type("Harbor", (HarborEnvironment,), told)

"""A Harbor task as an environment for TRL: a box per rollout; its tools are bash, read, write, submit.

    Harbor = harbor_environment("e2b")     the environment of a run with boxes = "e2b"; or, with changes, in your file

    row["harbor"] ──reset──▶ box with the task's files ── bash read write ──▶ … ── submit, or the last turn
                                                                │ BoxGone                      │
    get_reward   provider's fault (verdict.py) ──▶ None         ▼                              ▼
                 the episode broke its box     ──▶ 0.0, AtMostWorst         tests/ copied in, test.sh as root ──▶ reward
                 test.sh gives no number: it does so in a fresh box ──▶ 0.0, AtMostWorst; else ──▶ None

A box belongs to (run, slot, generation, place). The session that the environment reports to says the first three;
without one, the run is "alone-" and a random name. The place names this process, this instance and its episode.

Not promised: a box that comes back: a dead one is never replaced during an episode. The verdict costs the episode's
commands again, in a fresh box.
"""

import itertools
import json
import math
import os
import shlex
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from inner.extras.boxes.box import Box, BoxGone, BoxOwner, BoxRecipe, ProviderFailed
from inner.extras.boxes.starting import BoxStarter, open_provider
from inner.extras.boxes.verdict import Blamed, BoxAction, blame
from inner.host import Host
from inner.tasks.harbor import HarborTask, load_harbor, unpack
from inner.usercode.attempts import LARGEST, AtMostWorst

GONE, OVER = "the box is gone", "the episode is over"
PREDECESSORS = 3  # generations of its slot whose boxes a session stops
MOST_READ = 8192  # characters that `read` shows
VERIFIER = "mkdir -p /logs/verifier && rm -rf /logs/verifier/* && bash /tests/test.sh"
MOST_REWARD = 4096  # bytes of a file of REWARDS that are read
REWARDS = ("/logs/verifier/reward.txt", "/logs/verifier/reward.json")
_numbers = itertools.count()


class _Shared:
    """The BoxStarter of all instances.   provider: its name, or a BoxStarter.   options: the provider's."""

    def __init__(self, provider: str | BoxStarter, options: Mapping[str, Any]) -> None:
        self._provider, self._options = provider, options
        self._lock = threading.Lock()
        self.told = False  # whether the log has the provider's words since its last box

    @property
    def starter(self) -> BoxStarter:
        """Return the BoxStarter, made at the first call."""
        with self._lock:
            if isinstance(self._provider, str):
                self._provider = BoxStarter(open_provider(self._provider, **self._options))
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
        self._box: Box | None = None
        self._known = False
        self._judging = threading.Lock()  # a call of `get_reward` that lasted too long is made again

    @property
    def _starter(self) -> BoxStarter:
        return self._shared.starter

    @classmethod
    def _report_to(cls, host: Host) -> None:
        """Take run, slot and generation from the session, and stop the boxes that its last predecessors left."""
        cls._session = run, slot, generation = host.owner
        cls._host = host
        cls._shared.starter.on_used = host.rented
        for before in range(max(1, generation - PREDECESSORS), generation):
            _sweep_quietly(cls._shared.starter, {"run": run, "slot": slot, "generation": str(before)})

    def reset(self, harbor: str, **row: Any) -> None:
        """Begin the task of this row in a box of its own."""
        self._end()
        self._task = load_harbor(harbor)
        self._episode += 1
        self._actions = list[BoxAction]()
        self._submitted = self._known = False
        self._blamed: Blamed | None = None
        self._until: float | None = None
        self._starter.count("episodes")
        try:
            self._box = self._starter.start(self._owner(), _recipe(self._task))
            self._shared.told = False
        except ProviderFailed as error:
            self._settle("provider")
            self._tell_failed(error)

    def bash(self, command: str) -> str:
        """Run a shell command in the box.

        Args:
            command: the command, for bash
        """
        limit = min(self._command_s, max(1.0, self._left_s()))
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
        self._submitted = True
        return "submitted"

    def get_reward(self) -> float | None:
        """Return the verifier's number; None if the provider lost the box.   The box ends."""
        with self._judging:
            if not self._known:
                self._reward = self._judge()
                self._known = True
                self._end()
            return self._reward

    def _left_s(self) -> float:
        """Return the seconds of the task's limit that are left. They begin with the first call, not with a batch."""
        if self._until is None:
            self._until = self._starter.clock() + self._task.agent_s
        return self._until - self._starter.clock()

    def _act(self, run: Callable[[Box], Any]) -> Any:
        if (box := self._box) is None or self._blamed:
            return GONE
        if self._submitted or self._left_s() <= 0:
            return OVER
        self._actions.append(BoxAction(run))
        try:
            return run(box)
        except BoxGone:
            if self._box is box:  # else this call outlived inner.sampling.tool_timeout_s, and its episode
                self._find_blame()
            return GONE

    def _judge(self) -> float | None:
        if self._blamed is None and self._box is not None:
            self._actions.append(BoxAction(lambda box: _verify(box, self._task)))
            try:
                if (found := _verify(self._box, self._task)) is not None:
                    return found
                self._settle("policy" if self._verifies_untouched() else "provider")
            except BoxGone:
                self._find_blame()
        return AtMostWorst(0.0) if self._blamed == "policy" else None

    def _find_blame(self) -> None:
        self._settle(blame(self._actions, self._fresh, self._release))

    def _verifies_untouched(self) -> bool:
        """Whether the verifier gives a number in a box that no episode has touched."""
        try:
            return _verify(self._fresh(0), self._task) is not None
        except (BoxGone, ProviderFailed) as error:
            self._tell_failed(error)
            return False
        finally:
            self._release(0)

    def _settle(self, found: Blamed) -> None:
        self._blamed = found
        self._starter.count(found)

    def _fresh(self, n: int) -> Box:
        return self._starter.start(self._owner(f"-fresh{n}"), _recipe(self._task))

    def _release(self, n: int) -> None:
        _release_quietly(self._starter, self._owner(f"-fresh{n}"))

    def _end(self) -> None:
        self._box = None
        if self._episode:
            _release_quietly(self._starter, self._owner())
            self._tell_used()

    def _tell_failed(self, error: Exception) -> None:
        """Write an event of the provider's words, once until it gives a box again."""
        if self._host is not None and not self._shared.told:
            self._shared.told = True
            self._host.emit("boxes_failed", str(error))

    def _tell_used(self) -> None:
        """Write an event of the boxes of a batch, when its last one has ended."""
        if self._host is None or (used := self._starter.take_used()) is None:
            return
        text = f"{used.boxes} boxes, {used.seconds:.0f} box-seconds"
        price = self._starter.provider.price_per_hour  # of its options, which run.toml does not tell
        self._host.emit("boxes_used", text, boxes=used.boxes, box_s=used.seconds, usd_per_hour=price)

    def _owner(self, suffix: str = "") -> BoxOwner:
        run, slot, generation = self._session
        return BoxOwner(run, slot, generation, f"{self._place}-{self._episode}{suffix}")


def harbor_environment(
    provider: str | BoxStarter,
    *,
    command_s: float = HarborEnvironment._command_s,
    user: str = HarborEnvironment._user,
    options: Mapping[str, Any] | None = None,
) -> type[HarborEnvironment]:
    """Return an environment class whose instances share one BoxStarter, made at the first box.

    options: the provider's."""
    told = {"_shared": _Shared(provider, options or {}), "_command_s": command_s, "_user": user}
    return type("Harbor", (HarborEnvironment,), told)


def _recipe(task: HarborTask) -> BoxRecipe:
    ttl = 2 * (task.agent_s + task.verifier_s)
    return BoxRecipe(image=task.image, files=unpack(task.files), folder=task.folder, ttl_s=ttl)


def _verify(box: Box, task: HarborTask) -> float | None:
    """Return the reward that the task's test.sh writes; None if it writes no number."""
    box.exec("rm -rf /tests/* /tests/.[!.]*", user="root", timeout_s=60.0)  # what the episode may have put there
    try:
        for path, data in unpack(task.tests).items():
            box.write(path, data)
    except OSError:
        return None
    box.exec(VERIFIER, user="root", timeout_s=task.verifier_s)
    for path in REWARDS:
        written = box.exec(f"[ -f {path} ] && head -c {MOST_REWARD} -- {path}", user="root", timeout_s=60.0)
        if written.code == 0:
            return _read_number(written.output)
    return None


def _read_number(text: str) -> float | None:
    try:
        found = json.loads(text)
        number = float(found["reward"] if isinstance(found, dict) else found)
    except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError):  # 400 digits; 10,000 brackets
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST else None


def _sweep_quietly(starter: BoxStarter, labels: Mapping[str, str]) -> None:
    """Stop these boxes. What the provider does not stop now ends at its time to live, or in `diloco stop`."""
    try:
        starter.sweep(labels)
    except ProviderFailed:
        return


def _release_quietly(starter: BoxStarter, owner: BoxOwner) -> None:
    try:
        starter.release(owner)
    except ProviderFailed:
        return

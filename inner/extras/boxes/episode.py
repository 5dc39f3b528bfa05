"""Runs one episode in one box: its calls, the blame if the box dies, and its reward.

    act ────── BoxGone ──▶ blame decided once, in fresh boxes (verdict.py) ◀── BoxGone ── reward
      └ it may outlive inner.sampling.tool_timeout_s                        └ waits while `act` decides

    reward   provider's fault ──▶ None      the episode broke its box ──▶ 0.0, AtMostWorst
             places cleared, tests/ copied in, test.sh as root ──▶ its number
                no number, but one in a fresh box ──▶ 0.0, AtMostWorst      no number there ──▶ None
                the box dies at it: the same, after blame
             environment_mode = "separate": the same in the verifier's own box, with the artifacts (artifacts.py);
                that box may die once

The next episode is another object, with another owner. So a late call of this episode neither affects the next episode
nor stops its boxes.

Not promised: that an episode continues after its box died (a dead box is never replaced); an end of processes that an
episode started in the background of a remote box.
"""

import json
import math
import threading
from base64 import b64decode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from inner.errors import InnerError
from inner.extras.boxes.artifacts import Artifacts, collect, place
from inner.extras.boxes.box import (
    Box,
    BoxGone,
    BoxOwner,
    BoxRecipe,
    BuildFailed,
    ProviderFailed,
    make_executable,
    with_variables,
)
from inner.extras.boxes.starting import BoxStarter
from inner.extras.boxes.verdict import DEATHS, Blamed, blame
from inner.tasks.harbor import HarborTask, unpack
from inner.usercode.attempts import LARGEST, AtMostWorst

# exit code 0 only if nothing of the episode is left in these places, whatever permissions and links it made there
CLEAR = (
    "chmod -R u+rwX /logs /tests 2>/dev/null; rm -rf /logs/verifier /tests/* /tests/.[!.]* /tests/..?*; "
    'mkdir -p /logs && mkdir /logs/verifier && [ -z "$(ls -A /tests 2>/dev/null)" ]'
)
CLEAR_LOGS = "rm -rf /logs/verifier; mkdir -p /logs/verifier"  # in a box that has tests of its own
VERIFIER = "bash /tests/test.sh"
MOST_REWARD = 4096  # bytes of a file of REWARDS that are read
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")  # Harbor reads the first one first, too
SHOWN = 400  # characters of a verifier's output in the log


class Episode:
    """One episode.   owner: the owner of its box.   tell(event, text): logs that the provider gives no box, and why a
    verifier gives no number in a fresh box."""

    def __init__(
        self, starter: BoxStarter, owner: BoxOwner, task: HarborTask, tell: Callable[[str, str], None]
    ) -> None:
        self._starter, self._owner, self.task, self._tell = starter, owner, task, tell
        self.submitted = False
        self.actions = list[Callable[[Box], Any]]()
        self._survived = 0  # number of actions that the box has survived
        self._box: Box | None = None
        self._blamed: Blamed | None = None
        self._deciding = threading.Lock()  # held while a late call, or `reward`, decides why the box died
        self._until: float | None = None
        self._known = False
        self._reward: float | None = None
        self._judging = threading.Lock()  # `reward` may be called again while a slow call still runs

    def begin(self) -> bool:
        """Start the box; return whether there is one."""
        self._starter.count("episodes")
        try:
            self._box = self._starter.start(self._owner, _recipe(self.task))
        except ProviderFailed as error:
            self._settle("provider")
            self._tell_failed(error)
        return self._box is not None

    @property
    def is_gone(self) -> bool:
        """Whether the episode has lost its box."""
        return self._box is None or self._blamed is not None

    def left_s(self) -> float:
        """Return the seconds left of the task's limit, which begins with the first call, not with the batch."""
        if self._until is None:
            self._until = self._starter.clock() + self.task.agent_s
        return self._until - self._starter.clock()

    def act(self, run: Callable[[Box], Any], *, verifies: bool = False) -> Any:
        """Return the result of `run(box)`.   If the box dies, decide whose fault that is, and raise BoxGone.

        verifies: whether `run` is the verifier. If the verifier also ends a box that no episode has touched, the
        policy is not at fault."""
        if (box := self._box) is None or self._blamed:
            raise BoxGone("the box of this episode is gone.")
        self.actions.append(run)
        n = len(self.actions)
        try:
            found = run(box)
        except BoxGone:
            done = self.actions[:n]
            self._decide(box, lambda: self._blame(done, verifies=verifies))
            raise
        self._survived = max(n, self._survived)
        return found

    def reward(self) -> float | None:
        """Stop the box; return the verifier's number, or else 0.0 (AtMostWorst) if the policy is to blame, or None."""
        with self._judging:
            if not self._known:
                self._reward = self._judge()
                self._known = True
                self.end()
            return self._reward

    def end(self) -> None:
        self._box = None
        _release_quietly(self._starter, self._owner)

    def _judge(self) -> float | None:
        with self._deciding:  # a call that outlived its limit may still look for blame
            box = None if self._blamed else self._box
        try:
            if box is not None and (found := self._verdict()) is not None:
                return found
        except BoxGone:
            box = None
        except (ProviderFailed, InnerError) as error:  # no box for the verifier, or the key is refused by now
            self._tell_failed(error)
            self._decide(box, lambda: "provider")  # pyright: ignore
            box = None
        if box is not None:
            self._decide(box, lambda: "policy" if self._verifies_untouched() else "provider")
        return AtMostWorst(0.0) if self._blamed == "policy" else None

    def _verdict(self) -> float | None:
        """Return the verifier's number for this episode; None if it gives none."""
        if (apart := self.task.apart) is None:
            return self.act(lambda any_box: verify(any_box, self.task), verifies=True)
        tell = partial(self._tell, "reward_failed")
        found = self.act(lambda any_box: collect(any_box, apart.artifacts, tell))
        for n in range(DEATHS):
            try:
                return self._verify_apart(n, found)
            except BoxGone:
                continue
        return None

    def _verify_apart(
        self, n: int, found: Artifacts | None, tell: Callable[[str], None] = lambda why: None
    ) -> float | None:
        """Return the number of a verifier in a new box.   found: an episode's artifacts, if they are to be judged.

        We stop the episode's box first: an account may allow one box.   Raises BoxGone and ProviderFailed."""
        _release_quietly(self._starter, self._owner)
        try:
            box = self._starter.start(self._fresh_owner(n), _verifiers_recipe(self.task))
            if found is not None:
                place(box, found)
            return verify(box, self.task, tell)
        finally:
            self._release(n)

    def _decide(self, box: Box, find: Callable[[], Blamed]) -> None:
        """Decide whose fault the box's death was, unless that is decided already, or the episode is over."""
        with self._deciding:
            if self._box is box and self._blamed is None:
                found = find()
                if self._box is box:
                    self._settle(found)

    def _blame(self, actions: Sequence[Callable[[Box], Any]], *, verifies: bool) -> Blamed:
        found = blame(actions, self._fresh, self._release, survived=self._survived)
        return "provider" if found == "policy" and verifies and not self._verifies_untouched() else found

    def _settle(self, found: Blamed) -> None:
        self._blamed = found
        self._starter.count(found)

    def _verifies_untouched(self) -> bool:
        """Whether the verifier gives a number in a box that no episode has touched."""
        try:
            return self._verify_apart(0, None, partial(self._tell, "reward_failed")) is not None
        except (ProviderFailed, InnerError) as error:
            self._tell_failed(error)
        except BoxGone as error:
            text = f"no episode had touched this box of the Harbor task {self.task.name}, and it died at the verifier"
            self._tell("reward_failed", f"{text}: {error}")
        return False

    def _tell_failed(self, error: ProviderFailed | InnerError) -> None:
        if isinstance(error, BuildFailed):
            self._tell("image_failed", f"the Harbor task {self.task.name}: {error}")
        else:
            self._tell("boxes_failed", str(error))

    def _fresh(self, n: int) -> Box:
        return self._starter.start(self._fresh_owner(n), _recipe(self.task))

    def _release(self, n: int) -> None:
        _release_quietly(self._starter, self._fresh_owner(n))

    def _fresh_owner(self, n: int) -> BoxOwner:
        return replace(self._owner, place=f"{self._owner.place}-fresh{n}")


def box_recipes(task: HarborTask) -> list[BoxRecipe]:
    """Return the recipes of a task's boxes: the episode's box, then the verifier's own box, if it has one."""
    return [_recipe(task), *([_verifiers_recipe(task)] if task.apart else [])]


def _recipe(task: HarborTask) -> BoxRecipe:
    ttl = 2 * (task.agent_s + task.verifier_s)
    programs = [path for path in task.programs if path in task.files]
    return BoxRecipe(
        task.image, unpack(task.files), programs, folder=task.folder, ttl_s=ttl, offline=task.offline,
        base=task.base, build=b64decode(task.build),
    )  # fmt: skip


def _verifiers_recipe(task: HarborTask) -> BoxRecipe:
    """Return the recipe of a box in which the verifier judges without the episode's box."""
    recipe, apart = _recipe(task), task.apart
    if apart is None:
        return recipe
    own = dict[str, Any]()
    if apart.files is not None:
        own = {"files": unpack(apart.files), "base": apart.base, "build": b64decode(apart.build)}
        own["programs"] = apart.programs
    where = {"folder": apart.folder, "folders": task.artifact_paths}
    return replace(recipe, image=apart.image, offline=apart.offline, **where, **own)


def verify(box: Box, task: HarborTask, tell: Callable[[str], None] = lambda why: None) -> float | None:
    """Return the reward that the task's test.sh writes; None if it writes no number, after tell(why)."""
    if box.exec(CLEAR if task.tests else CLEAR_LOGS, user="root", timeout_s=60.0).code:
        return None
    try:
        for path, data in unpack(task.tests).items():
            box.write(path, data)
    except OSError:
        return None
    make_executable(box, [path for path in task.programs if path in task.tests])
    command = with_variables({**(task.apart or task).env, **task.verifier_env}, VERIFIER)
    ran = box.exec(command, user="root", timeout_s=task.verifier_s)
    found = "no file"
    for path in REWARDS:
        written = box.exec(f"[ -f {path} ] && head -c {MOST_REWARD} -- {path}", user="root", timeout_s=60.0)
        if written.code == 0:
            if (number := read_number(written.output)) is not None:
                return number
            found = f"{path} with {written.output[:SHOWN]!r}"
    tell(
        f"the verifier of the Harbor task {task.name} gives no number. It left {found}, exit code {ran.code}"
        f"{', its time limit,' if ran.timed_out else ''} and the output {ran.output[-SHOWN:]!r}. "
        'Write a number into /logs/verifier/reward.txt, or {"reward": 0.5} into reward.json, where a single number '
        "may have any name."
    )
    return None


def read_number(text: str) -> float | None:
    """Return the reward in the text of a file of REWARDS; None if the text has no number.

    Of several numbers, "reward" is the reward; a single number may have any name, as in Harbor's metrics."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # also 10,000 brackets
        found = text  # Harbor reads a text as float() does: .5 and +1, too
    if isinstance(found, dict):
        found = next(iter(found.values())) if len(found) == 1 else found.get("reward")
    try:
        number = float(found)  # pyright: ignore
    except (ArithmeticError, ValueError, TypeError):  # 400 digits
        return None
    return number if math.isfinite(number) and abs(number) <= LARGEST else None


def _release_quietly(starter: BoxStarter, owner: BoxOwner) -> None:
    """Stop a box. If the provider does not stop the box now, it ends at its time to live or in `diloco stop`."""
    with suppress(ProviderFailed, InnerError):
        starter.release(owner)

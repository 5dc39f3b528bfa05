"""Start boxes: few at a time, one per owner, and no box while the provider fails.

    start(owner) ── breaker shut? ──▶ a place among `at_once` STARTING ──▶ provider.start ──▶ Box
                        ▲                                                     │ ProviderFailed
                        └── jittered pause ◀── none ── find(labels) ◀─────────┘ one ──▶ adopted, no second create

    breaker: after `failures` failures of the provider in a row, over all episodes, every start waits for `pause_s`
    used: a box counts from its create, even if it died before its files were written, or if no process adopted it

The labels are known before the create, so `sweep({"run": …})` also stops a box whose create reply was lost, and which
no process remembers. `sweep` repeats until it finds no box.

Not promised: a limit over several processes. A create that takes effect after its look-up makes a second box; `release`
stops both, and the provider's time limit stops a box that no process releases.
"""

import random
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from inner.errors import InnerError
from inner.extras.boxes.box import (
    Box,
    BoxGone,
    BoxOwner,
    BoxProvider,
    BoxRecipe,
    BuildFailed,
    ProviderFailed,
    make_executable,
)
from inner.tasks.spec import PROVIDERS

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
AGAIN_S = 30.0  # seconds for a start, if the last start got no box: full budgets in a row would look like a hang
KINDS = {
    "local": ("local", "LocalBoxes"), "e2b": ("e2b_boxes", "E2bBoxes"), "modal": ("modal_boxes", "ModalBoxes"),
    "hf": ("hf_boxes", "HfBoxes"),
}  # fmt: skip
SWEEPS = 5  # the limit of tries of `sweep` until the provider's list is empty


@dataclass(frozen=True)
class Used:
    """The number of boxes that ended, and the sum of their seconds."""

    boxes: int = 0
    seconds: float = 0.0


class BoxStarter:
    """Start and stop boxes of one provider.   budget_s: wall time of one start.   clock: seconds, monotonic."""

    def __init__(
        self,
        provider: BoxProvider,
        *,
        at_once: int = 8,
        budget_s: float = 300.0,
        failures: int = 5,
        pause_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        seed: int | None = None,
    ) -> None:
        self.provider = provider
        self._starting = threading.Semaphore(at_once)
        self._budget_s, self._failures, self._pause_s = budget_s, failures, pause_s
        self.clock, self._sleep = clock, sleep
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._failed_in_a_row, self._shut_until = 0, float("-inf")
        self._gave_up = False  # whether the last finished start got no box
        self.counts = Counter[str]()
        self._since = dict[str, float]()  # owner's key -> time of its newest create; the box may exist
        self._there = set[str]()  # keys of owners whose start returned a box
        self._used = Used()
        self.on_used: Callable[[float, float | None], None] = lambda seconds, usd_per_hour: None  # one thread at a time

    def start(self, owner: BoxOwner, recipe: BoxRecipe) -> Box:
        """Return the owner's box.   Raises ProviderFailed when the budget is spent, BuildFailed at once."""
        budget_s = AGAIN_S if self._gave_up else self._budget_s
        end, pause, last = self.clock() + budget_s, FIRST_PAUSE_S, "the starts were paused"
        ambiguous = False
        while (left := end - self.clock()) > 0:
            if (shut := self._shut_until - self.clock()) > 0:
                self._sleep(min(shut, left))
                continue
            try:
                with self._place(left):
                    box = self._adopt(owner) if ambiguous else None
                    box = box or self._create(owner, recipe, timeout_s=max(0.0, end - self.clock()))
                    self._furnish(box, owner, recipe)
                self._note(failed=False)
                self._gave_up = False
                return box
            except BuildFailed:
                raise
            except ProviderFailed as error:
                ambiguous, last = True, str(error)
                self._note(failed=True)
            left = max(0.0, end - self.clock())
            self._sleep(min(left, self._random.uniform(0.5, 1.0) * pause))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self._gave_up = True
        raise ProviderFailed(f"no box within {budget_s:g} s: {last.rstrip('.')}. See the provider's status and quota.")

    def release(self, owner: BoxOwner) -> None:
        """Stop every box of this owner, including a late second box.   Raises ProviderFailed."""
        with self._lock:
            since, is_there = self._since.pop(owner.key, None), owner.key in self._there
            self._there.discard(owner.key)
        if is_there:
            self._use(since)
        stopped = self.sweep(owner.labels)
        if stopped and not is_there:  # its create's reply was lost, and no later start found its box
            self._use(since)

    def _use(self, since: float | None) -> None:
        """Count a box that existed from `since` until now."""
        seconds = 0.0 if since is None else self.clock() - since
        with self._lock:
            self._used = Used(self._used.boxes + 1, self._used.seconds + seconds)
            self.on_used(seconds, self.provider.price_per_hour)

    def take_used(self) -> "Used | None":
        """Return the use since the last call; None while a box runs, or if no box has run since then."""
        with self._lock:
            if self._since or not self._used.boxes:
                return None
            used, self._used = self._used, Used()
            return used

    def sweep(self, labels: Mapping[str, str]) -> int:
        """Stop all boxes with these labels; return how many.   Raises ProviderFailed if some are still there."""
        stopped = 0
        for _ in range(SWEEPS):
            found = self.provider.find(labels)
            if not found:
                return stopped
            for box in found:
                try:
                    box.stop()
                    stopped += 1
                except (BoxGone, ProviderFailed):
                    continue  # if the box still runs, the next look finds it again
        if left := len(self.provider.find(labels)):
            raise ProviderFailed(
                f"{left} boxes with {dict(labels)} still run after {SWEEPS} sweeps. Stop them by hand."
            )
        return stopped

    @contextmanager
    def _place(self, left_s: float) -> Iterator[None]:
        if not self._starting.acquire(timeout=left_s):
            raise ProviderFailed("other starts of boxes took all the time. Raise at_once, or use fewer rollouts")
        try:
            yield
        finally:
            self._starting.release()

    def _create(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> Box:
        with self._lock:
            self._since[owner.key] = self.clock()
        box = self.provider.start(owner, recipe, timeout_s=timeout_s)
        self.count("started")
        return box

    def _furnish(self, box: Box, owner: BoxOwner, recipe: BoxRecipe) -> None:
        """Write the recipe's files. An adopted box gets all of them, too.   Raises ProviderFailed."""
        folder = shlex.quote(recipe.folder)
        try:
            for path, data in recipe.files.items():
                box.write(path, data)
            make_executable(box, recipe.programs)
            box.exec(f"mkdir -p {folder} && chmod -R a+rwX {folder}", user="root", timeout_s=60.0)
        except (BoxGone, OSError) as error:
            box.stop()
            self._use(self._since.get(owner.key))
            if isinstance(error, BoxGone):
                raise ProviderFailed(f"a new box died: {error}") from error
            raise InnerError(f"a box cannot take the task's files: {error}. Correct its Dockerfile.") from error
        with self._lock:
            self._there.add(owner.key)

    def _adopt(self, owner: BoxOwner) -> Box | None:
        found = self.provider.find(owner.labels)
        for extra in found[1:]:
            extra.stop()
            self._use(self._since.get(owner.key))
        if found:
            self.count("adopted")
        return found[0] if found else None

    def _note(self, *, failed: bool) -> None:
        with self._lock:
            self._failed_in_a_row = self._failed_in_a_row + 1 if failed else 0
            self.counts["failed"] += failed
            if self._failed_in_a_row >= self._failures:
                self._failed_in_a_row, self._shut_until = 0, self.clock() + self._pause_s
                self.counts["pauses"] += 1

    def count(self, name: str) -> None:
        """Add one to `counts[name]`; episodes are counted here, too, with the verdicts on their boxes."""
        with self._lock:
            self.counts[name] += 1


class OpenedLater:
    """A provider that is opened at its first use, which may send a request; a failed opening is tried again later.

    Raises InnerError at once for errors that a second try would not change."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._open = lambda: open_provider(name, **options)
        self._lock = threading.Lock()
        self._provider: BoxProvider | None = None
        with suppress(ProviderFailed):
            self._opened()

    @property
    def price_per_hour(self) -> float | None:
        return None if self._provider is None else self._provider.price_per_hour

    def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> Box:
        return self._opened().start(owner, recipe, timeout_s=timeout_s)

    def find(self, labels: Mapping[str, str]) -> Sequence[Box]:
        return self._opened().find(labels)

    def _opened(self) -> BoxProvider:
        with self._lock:
            if self._provider is None:
                self._provider = self._open()
            return self._provider


def open_provider(name: str, **options: Any) -> BoxProvider:
    """Return the provider of this name.   Raises InnerError for other names.   options: its constructor's arguments."""
    if name not in PROVIDERS:
        raise InnerError(f"there is no provider of boxes {name!r}. Name one of: {', '.join(PROVIDERS)}.")
    module, kind = KINDS[name]
    return getattr(import_module(f"inner.extras.boxes.{module}"), kind)(**options)

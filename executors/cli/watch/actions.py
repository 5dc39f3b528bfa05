"""The keys of `diloco watch` that read more, or write: through the very code of `diloco logs`, `scale` and `drain`.

    l   LogAction       ─▶ lines of the session's log, dead or alive
    o   RolloutAction   ─▶ its newest rollouts, with their rewards; the first ones last
    e   EventsAction    ─▶ troubles and events in full
    d   DrainAction     ask ─▶ control: drain         ┐  read-only credentials: nothing is written, and it says so
    s   ScaleAction     number ─▶ price ─▶ ask ─▶ control: replicas  ┘

Each request runs in a thread; the picture goes on.

Not promised: an effect at once; the supervisor reads the control records every few moments.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.run.record import Run
from diloco.runlog.reader import read_report
from diloco.runlog.scope import COSTS
from diloco.views.samples import Sample, session_samples
from executors.cli.changing import scale
from executors.cli.looking import logs
from executors.cli.watch.looks import error_words
from executors.cli.watch.windows import AskWindow, NumberWindow, in_thread
from executors.supervision.money.bills import costs
from rendezvous.agreement.membership import Wanted
from rendezvous.errors import StoreRefused
from rendezvous.stores.cache import cache_of

if TYPE_CHECKING:
    from executors.cli.watch.app import WatchApp

TAIL = 500  # lines of a log
ROLLOUTS = 32


@dataclass(frozen=True)
class LogAction:
    """session: r01-2, or r01 where no replica has claimed the slot yet."""

    run: Run
    wanted: Wanted
    session: str

    @property
    def title(self) -> str:
        return f"log of {self.session}"

    def read(self) -> Sequence[str]:
        with logs.log_of(self.run.url, self.wanted, self.session) as log:
            return ["\n".join(log.lines(TAIL)) or "it has printed nothing yet"]


@dataclass(frozen=True)
class RolloutAction:
    """flagged: outer steps whose completions are worth a look, since the reward may be hacked there."""

    run: Run
    session: str
    flagged: range = range(0)

    @property
    def title(self) -> str:
        return f"rollouts of {self.session}"

    def read(self) -> Sequence[str]:
        slot, _, generation = self.session.partition("-")
        found = session_samples(self.run.store, slot, int(generation or 0), ROLLOUTS)
        none = f"{self.session} has written no rollouts (fleet.log_rollouts says how many it writes per outer step)"
        return [rollout_words(sample, self.flagged) for sample in found] or [none]


def rollout_words(sample: Sample, flagged: range) -> str:
    step, _, prompt, completion, reward = sample
    worth = "no reward" if reward is None else f"reward {reward:.4g}"
    flag = " · ! is its reward hacked? (docs/troubles.md)" if step - 1 in flagged else ""
    return f"outer step {step} · {worth}{flag}\n\n[prompt]\n{prompt}\n\n[completion]\n{completion}"


@dataclass(frozen=True)
class EventsAction:
    """Troubles, remarks and events of a picture, in full."""

    lines: tuple[str, ...]
    title = "troubles and events, the newest first"

    def read(self) -> Sequence[str]:
        return ["\n".join(self.lines) or "nothing has happened yet"]


class DrainAction:
    """Let one slot finish its round and leave."""

    def __init__(self, app: "WatchApp", slot: str) -> None:
        self.app = app
        self.slot = slot

    def begin(self) -> None:
        question = f"Drain {self.slot}? It finishes its round, offers it and leaves; its slot stays empty."
        self.app.push_screen(AskWindow(question), self._answered)

    def _answered(self, agreed: bool | None) -> None:
        looks = self.app.looks
        if agreed:
            write_in_thread(self.app, lambda: scale.drain(looks.run, looks.clock, self.slot))


class ScaleAction:
    """Keep another number of replicas."""

    def __init__(self, app: "WatchApp", replicas: int) -> None:
        self.app = app
        self.replicas = replicas

    def begin(self) -> None:
        self.app.push_screen(NumberWindow(f"{self.replicas} replicas now. How many?", self.replicas), self._named)

    def _named(self, number: int | None) -> None:
        if number is not None and number != self.replicas:
            in_thread(
                self.app,
                lambda: self._price(number),
                lambda lines: self._ask(number, lines),
                lambda error: _notify_refusal(self.app, error),
            )

    def _price(self, number: int) -> list[str]:
        run = self.app.looks.run
        spent = costs(read_report(run.store, COSTS, cache_of(run.store, run.record.nonce)), self.app.looks.clock.wall())
        quote = scale.growth_quote(run, number, None, spent)
        return [] if quote is None or quote.free else quote.lines()

    def _ask(self, number: int, lines: Sequence[str]) -> None:
        question = "\n".join([f"From {self.replicas} to {number} replicas?", *lines])
        self.app.push_screen(AskWindow(question), lambda agreed: self._answered(number, agreed))

    def _answered(self, number: int, agreed: bool | None) -> None:
        looks = self.app.looks
        if agreed:
            write_in_thread(self.app, lambda: scale.scale(looks.run, looks.clock, number, None))


def write_in_thread(app: "WatchApp", write: Callable[[], list[str]]) -> None:
    def done(lines: list[str]) -> None:
        app.notify("\n".join(lines), timeout=10, markup=False)
        app.action_look()

    in_thread(app, write, done, lambda error: _notify_refusal(app, error))


def _notify_refusal(app: "WatchApp", error: Exception) -> None:
    app.notify(refusal_words(error), severity="error", timeout=20, markup=False)


def refusal_words(error: Exception) -> str:
    if isinstance(error, StoreRefused):
        return f"nothing was written: these credentials may only read ({error})"
    return f"nothing was written: {error_words(error)}"

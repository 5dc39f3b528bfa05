"""The keys of `diloco watch` that read more, or write, with the code of `diloco logs`, `scale` and `drain`.

    l   log_text        ─▶ lines of the session's log, dead or alive
    o   rollouts_text   ─▶ its newest rollouts, with their rewards, and then its first
    e   events_text     ─▶ troubles and events in full
    d   drain           ask ─▶ control: drain         ┐  read-only credentials: a message, and nothing is written
    s   ScaleAction     number ─▶ price ─▶ ask ─▶ control: replicas  ┘

Each request runs in a thread; the screen is updated meanwhile.

Not promised: an effect at once; the supervisor reads the control records every few seconds.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from diloco.run.record import Run
from diloco.runlog.reader import read_report
from diloco.runlog.scope import COSTS
from diloco.views.samples import Sample, session_samples
from executors.cli.changing import scale
from executors.cli.looking import logs
from executors.cli.watch.looks import error_words
from executors.cli.watch.windows import AskWindow, NumberWindow, TextSource, in_thread
from executors.supervision.money.bills import costs
from rendezvous.agreement.membership import Wanted
from rendezvous.errors import StoreRefused
from rendezvous.stores.cache import cache_of

if TYPE_CHECKING:
    from executors.cli.watch.app import WatchApp

TAIL = 500  # lines of a log
ROLLOUTS = 32


def log_text(run: Run, wanted: Wanted, session: str) -> TextSource:
    """Return a session's log.   session: r01-2, or r01 for a slot without a claim."""

    def read() -> list[str]:
        with logs.log_of(run.url, wanted, session) as log:
            return ["\n".join(log.lines(TAIL)) or "it has printed nothing yet"]

    return TextSource(f"log of {session}", read)


def rollouts_text(run: Run, session: str, flagged: range) -> TextSource:
    """Return a session's rollouts.   flagged: outer steps at which the reward may be hacked."""
    slot, _, generation = session.partition("-")
    none = f"{session} has written no rollouts (fleet.log_rollouts says how many it writes per outer step)"

    def read() -> list[str]:
        found = session_samples(run.store, slot, int(generation or 0), ROLLOUTS)
        return [rollout_words(sample, flagged) for sample in found] or [none]

    return TextSource(f"rollouts of {session}", read)


def rollout_words(sample: Sample, flagged: range) -> str:
    step, _, prompt, completion, reward = sample
    worth = "no reward" if reward is None else f"reward {reward:.4g}"
    flag = " · ! is its reward hacked? (docs/troubles.md)" if step - 1 in flagged else ""
    return f"outer step {step} · {worth}{flag}\n\n[prompt]\n{prompt}\n\n[completion]\n{completion}"


def events_text(lines: Sequence[str]) -> TextSource:
    """Return these lines (troubles, warnings, events) as a text."""
    text = "\n".join(lines) or "nothing has happened yet"
    return TextSource("troubles and events, the newest first", lambda: [text])


def drain(app: "WatchApp", slot: str) -> None:
    """Let one slot finish its round and leave, if the user agrees."""
    looks = app.looks

    def answered(agreed: bool | None) -> None:
        if agreed:
            write_in_thread(app, lambda: scale.drain(looks.run, looks.clock, slot))

    question = f"Drain {slot}? It finishes its round, offers it and leaves; its slot stays empty."
    app.push_screen(AskWindow(question), answered)


class ScaleAction:
    """The dialog that sets another number of replicas."""

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

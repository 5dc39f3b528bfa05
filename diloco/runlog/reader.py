"""Read a run's report from its bucket.

    control, commits, offers, claims, beats, leaves, logs ──▶ Reader ──▶ Report ──┬▶ summary.py
                                                                                  └▶ diloco/views/page/charts.py
Any reader of the bucket can do this at any time, also during the run; `Reader.refresh` reads only new records.
This file does not import torch.

Not promised: a common time scale (each time is by its writer's clock); a replica's log between its last outer step
and a `kill -9`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from diloco.process.journal import Log, read_log
from diloco.run.record import RunRecord, with_script
from diloco.runlog.look import SUPERVISOR, Found, Owner, ReadSoFar, take_look
from diloco.runlog.scope import EVERYTHING, WHOLE, Focus, Scope
from diloco.runlog.sessions import SessionSummary, apply_event, restarted_by
from diloco.runlog.steps import Counted, Decision, Step, apply_step_events, kept_commit, read_commit
from inner.printable import printable
from rendezvous import layout
from rendezvous.agreement.membership import Wanted, claims_above, read_beat, read_claim, read_leave
from rendezvous.layout import is_slot
from rendezvous.records.digests import SHA256, digest
from rendezvous.records.records import Beat, Claim, Offer, WireError, decode_or_none
from rendezvous.store import Readable
from rendezvous.stores.ahead import Ahead, Answer

if TYPE_CHECKING:
    from diloco.runlog.evaluation import Evaluation
    from rendezvous.stores.cache import Cache

T = TypeVar("T")

MANY = 4096  # objects in memory at once
FORGET_EVERY = 50  # outer steps between two walks over all events


@dataclass
class Report:
    """All data that views show of a run."""

    name: str
    url: str
    config: dict[str, Any]
    wanted: Wanted
    steps: list[Step]
    sessions: list[SessionSummary]
    events: list[dict[str, Any]]  # by time; "who" is the session or "supervisor-N"
    beats: dict[str, Beat]
    twice: int  # pseudogradients that were listed more than once
    passed_over: int = 0  # lines and objects under log/ that no replica of this run wrote
    damage: str = ""  # text about a necessary record that cannot be read
    taken: int = 0  # number of commits, if the scope does not read them all
    supervisor: Claim | None = None  # the claim of the newest supervisor, alive or not
    request_s: float = 0.0  # seconds of the newest request to a bucket

    @property
    def head(self) -> int:
        logged = 1 + max((e["step"] for e in self.of_kind("step")), default=-1)  # for a run without commits
        return max(len(self.steps), self.taken) or logged

    @property
    def progress(self) -> str:
        """Return the outer steps taken and wanted: "3 of 20"; "3" if fewer than 3, or 0, are wanted."""
        return f"{self.head} of {self.wanted.steps}" if self.wanted.steps >= max(1, self.head) else f"{self.head}"

    @property
    def done(self) -> bool:
        return 0 < self.wanted.steps <= self.head

    @property
    def began(self) -> float:
        """Time of the run's first event.  Actors begin and end nothing, and may have other clocks."""
        times = [e["at"] for e in self.events if not layout.is_actor(e["who"].partition("-")[0])]
        times += [s.at for s in self.steps]
        return min([*times, *(x.claimed for x in self.sessions if is_slot(x.slot))], default=0.0)

    @property
    def ended(self) -> float:
        times = [s.at for s in self.steps] + [x.ended or x.claimed for x in self.sessions if is_slot(x.slot)]
        return max(times, default=self.began)

    @property
    def seconds(self) -> float:
        """Seconds from the run's first event to its last step or session end."""
        return self.ended - self.began

    @property
    def last_sign(self) -> float:
        """Time of the run's newest step, heartbeat, event or session end (Unix time)."""
        return max([self.ended, *(b.at for b in self.beats.values()), *(e["at"] for e in self.events[-1:])])

    @property
    def stopped(self) -> bool:
        """Whether the operator stopped the run, or its newest supervisor has ended."""
        words = [e for e in self.of_kind("started", "stopped") if e["who"].startswith(SUPERVISOR)][-1:]
        return self.wanted.stop or bool(words and words[0]["event"] == "stopped")

    @property
    def snapshot(self) -> int:
        """The step of the newest snapshot, by the newest commit or by the log of its writer."""
        told = [e["step"] for e in self.of_kind("snapshot") if type(e.get("step")) is int]
        return max([s.snapshot for s in self.steps[-1:]] + [t for t in told if t <= self.head], default=0)

    @property
    def slots(self) -> list[str]:
        return sorted({x.slot for x in self.sessions if is_slot(x.slot)} | set(self.wanted.slot_names))

    def setting(self, section: str, name: str, default: T) -> T:
        """Return a setting of run.json; the default if its type is wrong or it is a number below 0."""
        found = self.config.get(section)
        value = found.get(name) if isinstance(found, dict) else None
        return value if type(value) is type(default) and not (isinstance(value, int) and value < 0) else default

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of these kinds, by time."""
        return [self.events[i] for i in sorted(i for kind in kinds for i in self._index.get(kind, ()))]

    @cached_property
    def _index(self) -> dict[str, list[int]]:
        """Kind -> positions of its events, because the detectors of troubles call `of_kind` hundreds of times."""
        found: dict[str, list[int]] = {}
        for i, event in enumerate(self.events):
            found.setdefault(event["event"], []).append(i)
        return found

    @property
    def evaluations(self) -> "list[Evaluation]":
        """Rewards on held-out prompts, from the logs that were read."""
        from diloco.runlog.evaluation import read_evaluations

        return read_evaluations(self.of_kind("evaluated"))


# -------------------------------------------------------------------- reading


def read_report(store: Readable, scope: Scope = EVERYTHING, cache: "Cache | None" = None) -> Report:
    return Reader(store, scope, cache).refresh()


class Reader:
    """A reader of a bucket for repeated looks; it reads write-once records only once.

    scope: the records that the view needs.   cache: records that were read earlier (rendezvous/stores/cache.py).
    answers: those to the requests that opened the run (runlog/opening.py).
    ahead: the store with the unread answers of the last look, for example the supervisor's heartbeat.
    """

    def __init__(
        self,
        store: Readable,
        scope: Scope = EVERYTHING,
        cache: "Cache | None" = None,
        answers: Mapping[str, Answer] | None = None,
    ) -> None:
        self._bucket, self.ahead = store, Ahead(store, cache, answers=answers)
        self._scope = scope
        self._cache = cache
        self._first = True
        self._shown_from = 0
        self._run: dict[str, Any] = {}
        self._wanted = Wanted()
        self._steps: list[Step] = []
        self._last: bytes | None = None  # the newest commit's bytes
        self._listed: set[tuple[int, str]] = set()
        self._twice = self._forgotten = 0
        self._logs: dict[str, list[dict[str, Any]]] = {}
        self._sessions: dict[Owner, SessionSummary] = {}
        self._supervisor: Claim | None = None
        self._unclaimed: set[Owner] = set()  # listed sessions without a claim in this look
        self._extent = ReadSoFar()
        self._passed_over = 0
        self._damage = ""
        self._focus = WHOLE
        self._beats: dict[str, Beat] = {}
        self._uncredited: list[Decision] = []  # commits whose sessions are not known yet
        self._unread: list[Counted] = []  # offers to read, also the offers of a look that ended in an error

    def refresh(self, focus: Focus = WHOLE) -> Report:
        """Look at the run again.   focus: ignored in the first look.   After an error, the next look reads the rest."""
        if not self._first:
            self.ahead.forget()
        self._focus = WHOLE if self._first else focus
        if self._first and (cache := self.ahead.cache) is not None:
            from diloco.runlog.cached_look import look_with_cache

            found = look_with_cache(self.ahead, cache, self._scope)
        else:
            ended = frozenset(name for name, session in self._sessions.items() if session.how != "running")
            known = replace(self._extent, read=len(self._steps), ended=ended)
            found = take_look(self.ahead, self._scope, known, self._focus)
        if not self._run:
            self._run = self._read_config()
        self._wanted = found.wanted
        self._damage = found.lost or self._damage
        self._unclaimed.clear()
        self._read_claims()
        self._read_commits(found.commits)
        self._read_logs(found)
        events = sorted((e for lines in self._logs.values() for e in lines), key=lambda e: e["at"])
        self._read_beats()
        apply_step_events(self._steps, events)
        self._apply_ends(events)
        self._remember(found)
        return Report(
            name=shown(str(self._run.get("name", "run"))),
            url=self.ahead.url,
            config=self._run,
            wanted=self._wanted,
            steps=self._steps,
            sessions=[self._sessions[k] for k in sorted(self._sessions)],
            events=events,
            beats={slot: beat for slot, beat in self._beats.items() if slot in self._wanted.member_names},
            twice=self._twice,
            passed_over=self._passed_over,
            damage=self._damage,
            taken=0 if self._scope.commits else found.commits,
            supervisor=self._supervisor,
            request_s=getattr(self._bucket, "request_s", 0.0),
        )

    def forget_events_before(self, t: int) -> None:
        """Drop old "step" events, whose numbers the steps have, to save memory in a reader that runs for days."""
        if t < self._forgotten + FORGET_EVERY:
            return
        self._forgotten = t
        for key, events in self._logs.items():
            if any(e["event"] == "step" and e.get("step", t) < t for e in events):
                self._logs[key] = [e for e in events if e["event"] != "step" or e.get("step", t) >= t]

    def _remember(self, found: Found) -> None:
        """Keep the run's known extent for the next look; save the first look's records in the cache."""
        claims = {**self._extent.claims, **found.claims}
        logs = {**self._extent.logs, **{owner: to for owner, (_, to) in found.logs.items()}}
        self._extent = ReadSoFar(found.wanted, commits=found.commits, claims=claims, logs=logs, first=False)
        if self._cache is not None:  # in a long watch, later records would only fill the memory
            self._cache.save()
            self._cache = self.ahead.cache = None
        self._first = False

    def _read_config(self) -> dict[str, Any]:
        body = self.ahead.get(layout.RUN)
        if body is None:
            return {}
        try:
            record = with_script(RunRecord.decode(body), self.ahead)
            return {**record.config, "parent": str(record.parent)} if record.parent.url else record.config
        except WireError as error:
            self._damage = str(error)
            return {}

    def _read_commit(self, t: int) -> tuple[Decision, bytes] | None:
        """Return commit t and its bytes; None if it is missing or unreadable."""
        key = layout.commit_key(t)
        decode = kept_commit if self.ahead.is_cached(key) else read_commit
        body = self.ahead.get(key)
        try:
            commit = None if body is None else decode(body)
        except WireError as error:
            self._damage = f"commit {t} cannot be read: {error}. Restore {key} from a backup"
            return None
        if commit is None or body is None:
            return None
        if commit.t != t:
            self._damage = f"commit {t} names step {commit.t}"
            return None
        return commit, body

    def _read_commits(self, count: int) -> None:
        if not self._scope.commits:
            self._keep_newest(count)
            return
        self._shown_from = count if self._first else self._shown_from
        while (found := self._read_commit(len(self._steps))) is not None:
            c, body = found
            self.ahead.keep(layout.commit_key(c.t))
            linked = c.prev == (digest(self._last, SHA256) if self._last is not None else None)
            self._steps.append(Step.of_commit(c, linked=linked))
            self._last = body
            self._note_listed(c)
        listed = {(o.slot, o.generation) for c in self._uncredited for o in c.offers}
        self.ahead.ask(layout.claim_key(*session) for session in listed - self._sessions.keys())
        while self._uncredited:
            self._credit_offers(self._uncredited[0])
            del self._uncredited[0]
        self._read_offers()

    def _note_listed(self, commit: Decision) -> None:
        for o in commit.offers:
            self._twice += (o.step, o.slot) in self._listed
            self._listed.add((o.step, o.slot))
        self._uncredited.append(commit)
        self._unread += offers_to_read(commit, self._scope, self._shown_from, self._focus.most)

    def _keep_newest(self, count: int) -> None:
        """Keep the newest commit in the cache, as a proof that the cached records are of this run.

        Without a cache we do not read this commit, so that `stop` can end a run whose newest commit was forged."""
        if self._cache is not None and count and self._read_commit(count - 1) is not None:
            self.ahead.keep(layout.commit_key(count - 1))

    def _read_offers(self) -> None:
        while self._unread:
            some = self._unread[:MANY]
            self.ahead.ask(layout.offer_key(o.step, o.slot, 0) for o in some)
            for o in some:
                self._read_offer(o.step, o.slot, o.nonce)
            del self._unread[:MANY]

    def _read_offer(self, t: int, slot: str, nonce: str) -> None:
        attempt = 0
        while (body := self.ahead.get(layout.offer_key(t, slot, attempt))) is not None:
            offer = decode_or_none(Offer, body)
            if offer is not None and offer.nonce == nonce:
                self.ahead.keep(layout.offer_key(t, slot, attempt))
                self._steps[t].add_offer(slot, offer)
                return
            attempt += 1

    def _credit_offers(self, commit: Decision) -> None:
        for name in sorted({(o.slot, o.generation) for o in commit.offers}):
            if name not in self._sessions and name not in self._unclaimed:
                if (taken := read_claim(self.ahead, *name)) is not None:
                    self._begin_session(taken)
                else:
                    self._unclaimed.add(name)
            if name in self._sessions and (commit.t, commit.at) not in self._sessions[name].commits[-1:]:
                self._sessions[name].commits.append((commit.t, commit.at))

    def _read_beats(self) -> None:
        for slot in filter(self._focus.reads_beat, self._wanted.member_names):
            beat = read_beat(self.ahead, slot)
            if beat is not None:
                self._beats[slot] = replace(beat, **shown(vars(beat)))
            else:
                self._beats.pop(slot, None)

    def _read_claims(self) -> None:
        for slot in filter(self._focus.reads_sessions, self._wanted.member_names):
            known = max((g for s, g in self._sessions if s == slot), default=0)
            for taken in claims_above(self.ahead, slot, known):
                self.ahead.keep(layout.claim_key(slot, taken.generation))
                self._begin_session(taken)
        if not self._focus.supervisor:
            return
        for taken in claims_above(self.ahead, SUPERVISOR, self._supervisor.generation if self._supervisor else 0):
            self.ahead.keep(layout.claim_key(SUPERVISOR, taken.generation))
            self._supervisor = taken

    def _begin_session(self, taken: Claim) -> None:
        if (taken.slot, taken.generation) in self._sessions:
            return
        session = SessionSummary(taken.slot, taken.generation, taken.pid, shown(taken.host), taken.at)
        if taken.host.startswith(f"{SUPERVISOR}/"):  # a supervisor closed the slot to a launch that does not end
            session.ended = taken.at
            session.how = "fence"
        self._sessions[taken.slot, taken.generation] = session

    def _read_logs(self, found: Found) -> None:
        """Read every new log object.  The newest object is not cached: its writer may write it again."""
        if self._scope.newest is None:
            keys = [key for key in self.ahead.list(layout.LOGS) if not layout.is_rollouts(key)]
        else:
            keys = [layout.log_key(*owner, n) for owner, (a, b) in sorted(found.logs.items()) for n in range(a, b)]
        news = [key for key in keys if key not in self._logs]
        newest = _newest_numbers(news)
        for i in range(0, len(news), MANY):
            self.ahead.ask(news[i : i + MANY])
            for key in news[i : i + MANY]:
                owner = layout.log_owner(key)
                self._read_log(key, owner)
                if owner is not None and layout.log_number(key) < newest[owner]:
                    self.ahead.keep(key)

    def _read_log(self, key: str, owner: Owner | None) -> None:
        """Read a log object; a foreign one counts as one line without an event."""
        log = Log([], passed_over=1) if owner is None else read_log(self.ahead, key)
        self._logs[key] = [_as_event(e, *owner) for e in log.events] if owner else []
        self._passed_over += log.passed_over

    def _apply_ends(self, events: Iterable[dict[str, Any]]) -> None:
        for session in self._sessions.values():
            self._end_by_records(session)
        for e in events:
            apply_event(self._sessions, e)
        for (slot, generation), session in self._sessions.items():
            if (successor := self._sessions.get((slot, generation + 1))) is not None and session.how != "running":
                session.restarted_by = restarted_by(session.host, slot, successor.host)

    def _end_by_records(self, session: SessionSummary) -> None:
        waits = session.how == "running" and self._focus.reads_sessions(session.slot)
        leave = read_leave(self.ahead, session.slot, session.generation) if waits else None
        if leave is not None:
            self.ahead.keep(layout.leave_key(session.slot, session.generation))
            session.ended = leave.at
            session.how = "done" if leave.reason == "done" else "left"
        successor = self._sessions.get((session.slot, session.generation + 1))
        if session.how == "running" and successor is not None:
            session.ended = successor.claimed
            session.how = "replaced"


def offers_to_read(commit: Decision, scope: Scope, shown_from: int, most: int | None) -> list[Counted]:
    """Return the offers whose records a look reads: all, or a few, of slots that change from step to step.

    most: the limit of such offers per step that the scope reads whole; None: all."""
    if not scope.reads_offers(commit.t, shown_from) and not (most := scope.sampled_offers(commit.t, shown_from)):
        return [o for o in commit.offers if scope.reads_offers(o.step, shown_from)]
    fresh = list(commit.offers)
    if most is None or len(fresh) <= most:
        return fresh
    turn = commit.t * most % len(fresh)
    return (fresh[turn:] + fresh[:turn])[:most]


def _newest_numbers(keys: Iterable[str]) -> dict[Owner, int]:
    """Return session -> the number of its newest log."""
    newest: dict[Owner, int] = {}
    for key in keys:
        if (owner := layout.log_owner(key)) is not None:
            newest[owner] = max(layout.log_number(key), newest.get(owner, 0))
    return newest


def _as_event(raw: dict[str, Any], owner: str, generation: int) -> dict[str, Any]:
    """Make an event.  A supervisor's event names the slot that it is about; a replica's event is about its own slot."""
    about = {} if owner == SUPERVISOR else {"slot": owner, "generation": generation}
    return {"slot": "", "generation": 0, **shown(raw), **about, "who": f"{owner}-{generation}"}


def shown(value: Any) -> Any:
    """Return the value with each text on one line, without terminal escapes: any writer may have put them there."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {str(shown(k)): shown(v) for k, v in value.items()}
    return [shown(v) for v in value] if isinstance(value, list) else value


# -------------------------------------------------------------------- showing


def first_and_last(report: Report) -> tuple[float, float] | None:
    """Return the mean rewards of the first and of the last outer step that have rewards."""
    rewards = [r for s in report.steps if (r := s.mean_reward) is not None]
    return (rewards[0], rewards[-1]) if rewards else None

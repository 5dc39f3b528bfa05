"""The code that runs on Modal, and the parts that launcher and container share: names, functions, the register.

    app diloco-{run}-{hash}        one per run
    ├── replica-{key}   one function per kind of container (GPUs, time limit, secrets); its body is `replica`
    └── supervise       a small one without GPU: the supervisor of a detached run

    dict of the same name: the     launch/r00.1  the only call that may run this launch: written once, by the launcher
    register                                     or the call's container; every other call ends at once
                                   duplicate/r00.1/… a duplicate call, and when its container began
                                   newest/r00    the highest attempt
                                   start/r00.1/n, left/r00.1/n   the n-th container began; Modal interrupted it
                                   asked/r00.1   an executor asked to cancel it
                                   until         Unix time at which the launcher's lease ends (short_form.py)
                                   kinds         the functions that were deployed
                                   fingerprint   of the image and the source that they were deployed with
                                   objects       ids in the deployed functions: secret/NAME, volume/NAME ─▶ id

So a launch runs once, even if it is repeated, if its reply is lost, or if its launcher dies.  The register counts a
launch's starts, so that a launch whose containers die repeatedly ends: Modal would restart them for ever.

Not promised: that a duplicate call costs nothing; its container starts, reads one key and ends.
"""

import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from diloco.process import exitcodes
from executors.platforms.base import Handle, Plain, ReplicaSpec, load_name, short_name
from executors.platforms.container import run_replica
from executors.platforms.on_modal.client import ask_patiently, no_answer, sdk
from executors.platforms.on_modal.kinds import Kind
from rendezvous.clock import SystemClock
from rendezvous.layout import SUPERVISOR

NAME = "modal"
PREFIX = "diloco-"
SUPERVISE = "supervise"
NEXT_SUPERVISOR = "executors.supervision.hosted:start_next"
CUT_OFF = "executors.supervision.hosted:is_cut_off"
CRASHES = 3  # a launch has failed after so many containers that died without a report


def app_name(run: str) -> str:
    """Return the name of the app and of the dict: at most 64 letters, digits and dashes."""
    return f"{PREFIX}{short_name(run)}"


def handle_of(run: str, slot: str, attempt: int, entry: Mapping[str, Any]) -> Handle:
    """Return the handle of a call, from its entry in the register."""
    known = {"native": entry["call"], "launched_at": entry["launched_at"], "usd_per_hour": entry["usd_per_hour"]}
    return Handle(run, slot, attempt, NAME, **known)


@dataclass(frozen=True)
class Note(Plain):
    """A call's second argument, beside its spec: the data with which the container registers the call."""

    register: str
    launched_at: float
    usd_per_hour: float | None
    crashes: int = CRASHES


@dataclass(eq=False)
class Register:
    """The launches of one run."""

    _entries: Any

    @classmethod
    def open(cls, name: str, create: bool = True) -> Self:
        return cls(sdk().Dict.from_name(name, create_if_missing=create))

    def claim(self, spec: ReplicaSpec, call: str, note: Note) -> dict[str, Any]:
        """Claim this launch for a call; return the entry of the call that runs it: this call, or an earlier call."""
        entry = {"call": call, "launched_at": note.launched_at, "usd_per_hour": note.usd_per_hour}
        if self._entries.put(f"launch/{spec.slot}.{spec.attempt}", entry, skip_if_exists=True):
            return entry
        return self._entries[f"launch/{spec.slot}.{spec.attempt}"]

    def look(self) -> tuple[dict[tuple[str, int], dict[str, Any]], dict[str, int]]:
        """Return two dicts: (slot, attempt) -> entry, of every launch; slot -> its newest attempt."""
        launched: dict[tuple[str, int], dict[str, Any]] = {}
        newest: dict[str, int] = {}
        for key, entry in self._entries.items():
            kind, _, name = key.partition("/")
            if kind == "launch":
                slot, _, attempt = name.rpartition(".")
                launched[slot, int(attempt)] = entry
            elif kind == "newest":
                newest[name] = entry
        return launched, newest

    def note_duplicate(self, spec: ReplicaSpec, call: str, note: Note) -> None:
        """Record that a container of a duplicate call was started, and is billed."""
        entry = {"call": call, "launched_at": time.time(), "usd_per_hour": note.usd_per_hour}
        self._entries[f"duplicate/{spec.slot}.{spec.attempt}/{call}"] = entry

    def duplicates(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Return (slot, attempt, entry) of every duplicate call."""
        found = [(key.split("/"), e) for key, e in self._entries.items() if key.startswith("duplicate/")]
        launches = [(launch.rpartition("."), e) for (_, launch, _), e in found]
        return [(slot, int(attempt), e) for (slot, _, attempt), e in launches]

    def names(self, handle: Handle) -> bool:
        """Whether this run launched that call.  Writers of the run's bucket cannot write into this register."""
        launch = f"{handle.slot}.{handle.attempt}"
        entry = self._entries.get(f"launch/{launch}") or {}
        return entry.get("call") == handle.native or self._entries.contains(f"duplicate/{launch}/{handle.native}")

    def announce(self, attempts: Mapping[str, int]) -> None:
        """Announce attempts before their launch, so that an older attempt that starts later ends at once."""
        self._entries.update({f"newest/{slot}": attempt for slot, attempt in attempts.items()})

    def newest(self, slot: str) -> int:
        return self._entries.get(f"newest/{slot}", 0)

    def began(self, slot: str, attempt: int) -> bool:
        return self._entries.contains(f"start/{slot}.{attempt}/1")

    def begin(self, spec: ReplicaSpec, mark: str) -> int:
        """Record that a container of this launch begins; return its number, from 1.

        mark: unique to this container, which so recognises its own record if the answer was lost.
        """
        entry = f"{time.time():.3f} {mark}"
        n = 1
        while not self._entries.put(key := f"start/{spec.slot}.{spec.attempt}/{n}", entry, skip_if_exists=True):
            if str(self._entries.get(key)).endswith(mark):
                break
            n += 1
        return n

    def leave(self, spec: ReplicaSpec, n: int) -> None:
        self._entries[f"left/{spec.slot}.{spec.attempt}/{n}"] = time.time()

    def crashes(self, spec: ReplicaSpec, n: int) -> int:
        """Return how many containers before the n-th crashed: they ended, and Modal had not interrupted them."""
        return sum(not self._entries.contains(f"left/{spec.slot}.{spec.attempt}/{i}") for i in range(1, n))

    def ask(self, slot: str, attempt: int) -> None:
        self._entries[f"asked/{slot}.{attempt}"] = True

    def asked(self, slot: str, attempt: int) -> bool:
        return self._entries.contains(f"asked/{slot}.{attempt}")

    def renew(self, until: float) -> None:
        self._entries["until"] = until

    def until(self) -> float:
        """Return the Unix time at which the lease of a launcher without a supervisor ends; 0 without a lease."""
        return self._entries.get("until", 0.0)

    def kinds(self) -> list[Kind]:
        return [Kind.from_dict(raw) for raw in self._entries.get("kinds", [])]

    def fingerprint(self) -> str:
        """Return the fingerprint of the image and the source that were deployed last."""
        return self._entries.get("fingerprint", "")

    def objects(self) -> dict[str, str]:
        """Return name -> id of the objects in the deployed functions.  An object that was recreated has another id."""
        return self._entries.get("objects", {})

    def deployed(self, kinds: list[Kind], fingerprint: str, objects: Mapping[str, str]) -> None:
        found = {"kinds": [k.to_dict() for k in kinds], "fingerprint": fingerprint, "objects": dict(objects)}
        self._entries.update(found)


# ---------------------------------------------------------------------- in the container


def replica(raw: Mapping[str, Any], raw_note: Mapping[str, Any]) -> dict[str, Any]:
    """Run one replica and return its end as data.  This is the body of every deployed function.

    The function raises only interruptions: Modal then starts a preempted input again, and ends a cancelled input.
    """
    spec = ReplicaSpec.from_dict(raw)
    note = Note.from_dict(raw_note)
    try:
        register = Register.open(note.register, create=False)
        clock = SystemClock()
        call = sdk().current_function_call_id()
        if (refusal := ask_patiently(lambda: _why_unwanted(register, spec, note, call), clock)) is not None:
            return refusal
        mark = uuid.uuid4().hex
        n = ask_patiently(lambda: register.begin(spec, mark), clock)
        if ask_patiently(lambda: register.crashes(spec, n), clock) >= note.crashes:
            why = f"its container died {note.crashes} times without a report: out of memory, or killed"
            return {**ended(None, why), "final": True}
        try:
            end = run_replica(raw, NAME, until=register.until)
            return end if n == 1 else {**end, "began": 0.0}  # earlier containers have reported no times
        except BaseException:
            with suppress(Exception):
                register.leave(spec, n)
            raise
    except sdk().exception.NotFoundError:
        return ended(
            exitcodes.FENCED, f"the register {note.register} is gone: the run was purged, so this call ends, too"
        )
    except Exception as error:  # an error between Modal's own services counts as LOST, not as the replica's fault
        return ended(None if no_answer(error) else 1, f"{type(error).__name__}: {error}")


def supervise(raw: Mapping[str, Any], raw_note: Mapping[str, Any]) -> dict[str, Any]:
    """Run a run's supervisor like a replica; at its time limit, start the next supervisor.

    Raise if no next supervisor could be started, or if this supervisor was cut off: Modal then repeats the call.  The
    register counts the repetitions, and a supervisor that died too often is not repeated.
    """
    end = replica(raw, raw_note)
    if end["exit_code"] == exitcodes.RESUME:
        if not load_name(NEXT_SUPERVISOR)(NAME, {}, raw):  # about three minutes are left for this
            raise RuntimeError("the next supervisor could not be started; Modal starts this one again")
    elif not end.get("final") and load_name(CUT_OFF)(raw["run"], end["exit_code"]):
        raise RuntimeError(f"the supervisor was cut off ({end['reason']}); Modal starts it again")
    return end


def _why_unwanted(register: Register, spec: ReplicaSpec, note: Note, call: str) -> dict[str, Any] | None:
    winner = register.claim(spec, call, note)["call"]
    if winner != call:
        register.note_duplicate(spec, call, note)
        return ended(exitcodes.FENCED, f"{spec.slot}.{spec.attempt} is run by {winner}, so this second call ends")
    if spec.slot == SUPERVISOR:  # its successor may be announced and never start: the run's lease says who may act
        return None
    newest = register.newest(spec.slot)
    if newest > spec.attempt:
        return ended(exitcodes.FENCED, f"{spec.slot}.{newest} was launched before {spec.slot}.{spec.attempt} began")
    return None


def ended(code: int | None, reason: str) -> dict[str, Any]:
    print(reason, flush=True)
    return {"exit_code": code, "reason": reason, "value": None, "tail": [reason]}

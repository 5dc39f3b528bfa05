"""Replicas as function calls on Modal.

    specs ──▶ checked ──▶ app deployed, once ──▶ spawn per replica, all at once ──▶ handles, native = FunctionCall id
                                                    └─ dict: which call runs which launch (app.py)
    poll     all at once, what becomes of a call (calls.py)
    cancel   interrupts the input; after `grace_s` a later poll ends the container

Nothing hangs on this process: calls of a deployed app live on without it, and the dict finds them again.  Modal starts
a preempted or crashed input again by itself, behind the same handle; crashes are counted and bounded.

Not promised: that RUNNING means a container right now; between a preemption and the next start there is none.
"""

import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from typing import Any, TypeVar

from diloco.runlog.report import SUPERVISOR
from executors.platforms.base import (
    RANK_ENV,
    REPLICA,
    ExecutorError,
    Handle,
    LaunchPlan,
    ReplicaSpec,
    Result,
    State,
    Status,
    ranked_specs,
    unanswered,
    wait_for_all,
)
from executors.platforms.on_modal import app as modal_app
from executors.platforms.on_modal import calls as modal_calls
from executors.platforms.on_modal.app import SUPERVISE, Note, Register, app_name
from executors.platforms.on_modal.client import (
    SECRET_KEYS,
    access_denied_error,
    ask_patiently,
    check_secret,
    how_to_create,
    inside_container,
    is_access_denied,
    no_answer,
    sdk,
    translated_errors,
    volume_id,
)
from executors.platforms.on_modal.image import fingerprint, image_of, with_source
from executors.platforms.on_modal.kinds import AS_OF, DAY_S, Kind
from executors.platforms.on_modal.twins import Twins, count_inputs
from rendezvous.clock import Clock, SystemClock

AT_ONCE = 32
ANSWER_S = 20.0  # a poll takes no longer; what is not known by then is stale
TAIL = 12
COLLECT_S = 2.0
SUPERVISOR_CRASHES = 10
MEMORY_MIB = 16 * 1024  # a container's limit where nobody knows the size of the model
T = TypeVar("T")


class ModalExecutor:
    """image: a modal.Image or the name of one in a registry (default: Debian with the versions installed here).

    gpu, secrets, timeout_s: for specs that do not say.  gpu: kinds in order of preference; whichever is free is taken.
    region: e.g. "us"; it costs more.   cores, memory_mib: reserved per container.   prices: {"H100": 3.50, …}.
    max_cores, max_memory_mib: what it may use at most, and is billed for (default: twice the cores; 16 GiB).
    pip: packages that a reward of your own needs, beside those that the project needs.
    hub_cache: a Volume that keeps what containers take from the Hugging Face Hub; made if there is none ("": no such).
    """

    name = modal_app.NAME

    def __init__(
        self,
        image: Any = None,
        *,
        gpu: str | Sequence[str] = (),
        secrets: Sequence[str] = (),
        timeout_s: float = DAY_S,
        region: str = "",
        cores: float = 2.0,
        memory_mib: int = 8192,
        max_cores: float = 0.0,
        max_memory_mib: int = 0,
        pip: Sequence[str] = (),
        hub_cache: str = "",
        prices: Mapping[str, float] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._image = image
        self._prices = dict(prices or {})
        self._clock = clock or SystemClock()
        gpus = (gpu,) if isinstance(gpu, str) else tuple(gpu)
        most = {"max_cores": max_cores or 2.0 * cores, "max_memory_mib": max_memory_mib or max(MEMORY_MIB, memory_mib)}
        size = {"cores": float(cores), "memory_mib": memory_mib, **most}
        self._default = Kind(gpus, float(timeout_s), tuple(secrets), region, hub_cache=hub_cache, **size)
        self._pip = (pip,) if isinstance(pip, str) else tuple(pip)
        if why := self._default.fault:
            raise ExecutorError(why)
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="modal")
        self._registers: dict[tuple[str, bool], Register] = {}
        self._deployed: dict[str, set[str]] = {}  # run -> functions, and packages of entry points
        self._expected: dict[str, set[Kind]] = {}  # run -> what will be launched later
        self._functions: dict[tuple[str, str], Any] = {}
        self._failed: dict[Handle, Status] = {}  # launches that were none
        self._ended: dict[Handle, tuple[Status, Mapping[str, Any]]] = {}
        self._last: dict[Handle, Status] = {}
        self._deadlines: dict[Handle, float] = {}
        self._twins = Twins(self._clock)

    # ------------------------------------------------------------------ what a launch would do

    def plan(self, specs: Sequence[ReplicaSpec]) -> LaunchPlan:
        kinds = [self._kind_of(s) for s in specs]
        faults = [self._why_not(s) for s in specs]
        prices = [None if why else k.usd_per_hour(self._prices) for k, why in zip(kinds, faults, strict=True)]
        lines = [f"{s.slot}: {why or k.words(p)}" for s, k, p, why in zip(specs, kinds, prices, faults, strict=True)]
        apps = ", ".join(sorted({app_name(s.run) for s in specs}))
        lines += [f"app {apps}; prices as of {AS_OF}, see modal.com/pricing", *_secret_advice(specs, kinds)]
        if volumes := sorted({k.hub_cache for k in kinds if k.hub_cache}):
            lines.append(
                f"what is taken from the Hugging Face Hub stays in the Volume {', '.join(volumes)}, for later runs"
            )
        lines += [f"its image has what this project needs, and {', '.join(self._pip)}"] if self._pip else []
        known = [p for p in prices if p is not None]
        refused = tuple(dict.fromkeys(why for why in faults if why))
        return LaunchPlan(tuple(lines), sum(known) if len(known) == len(prices) else None, refused)

    def _kind_of(self, spec: ReplicaSpec) -> Kind:
        default = self._default
        return replace(
            default,
            gpu=tuple(spec.gpu) or default.gpu,
            timeout_s=float(spec.timeout_s) or default.timeout_s,
            secrets=tuple(spec.secrets) or default.secrets,
        )

    def _why_not(self, spec: ReplicaSpec) -> str:
        """Why it cannot be started, or ""."""
        scheme, found, _ = spec.run.partition("://")
        if spec.run and (not found or scheme in ("file", "memory")):
            return (
                f"{spec.run} is on this machine, and Modal's containers cannot reach it. Put the run into a bucket, "
                "e.g. --run s3://BUCKET/NAME, and give them its keys as a secret"
            )
        return self._kind_of(spec).fault

    # ------------------------------------------------------------------ starting

    def launch_replicas(
        self,
        specs: Sequence[ReplicaSpec] | None = None,
        *,
        n_replicas: int = 0,
        entrypoint: str = REPLICA,
        entrypoint_args: Mapping[str, Any] | None = None,
        rank_env: str = RANK_ENV,
    ) -> list[Handle]:
        if specs is None:
            specs = ranked_specs("", n_replicas, entrypoint, entrypoint_args, rank_env)
        nameless = f"{self.name}://{uuid.uuid4().hex}"
        specs = [s if s.run else replace(s, run=nameless) for s in specs]
        faults = [self._why_not(s) for s in specs]
        if specs and all(faults):
            raise ExecutorError(faults[0])
        known: dict[tuple[str, str, int], Mapping[str, Any]] = {}
        for run in {s.run for s in specs}:
            good = [s for s, why in zip(specs, faults, strict=True) if s.run == run and not why]
            known |= {(run, *key): entry for key, entry in self._prepare_launch(run, good).items()}
        entries = [known.get((s.run, s.slot, s.attempt)) for s in specs]
        return list(self._threads.map(self._launch_one, specs, faults, entries))

    def expect(self, specs: Sequence[ReplicaSpec]) -> None:
        """Launches that follow: one deploy has what they need, too."""
        for spec in specs:
            self._expected.setdefault(spec.run, set()).add(self._kind_of(spec))

    def supervise(self, run: str, argv: Sequence[str] = ()) -> Handle:
        """A supervisor for the run as a small function; the one that runs already, if there is one."""
        found = [h for h in self.find(run) if h.slot == SUPERVISOR]
        if found and not self.poll(found)[0].state.ended:
            return found[0]
        return self.start_supervisor(run, 1 + max((h.attempt for h in found), default=0), argv)

    def start_supervisor(self, run: str, attempt: int, argv: Sequence[str] = (), timeout_s: float = DAY_S) -> Handle:
        """One more of them; it leaves before `timeout_s`, and starts the next one."""
        replicas = [] if inside_container() else self._supervised_specs(run)
        env = {k: v for s in replicas for k, v in s.env.items()}
        spec = ReplicaSpec(
            run,
            SUPERVISOR,
            attempt,
            "executors.supervision.supervisor:main",
            (run, *argv),
            env=env,
            timeout_s=timeout_s,
        )
        if why := self._why_not(spec):
            raise ExecutorError(why)
        launched = self._prepare_launch(run, [spec], replicas, SUPERVISE)
        return self._launch_one(spec, "", launched.get((SUPERVISOR, attempt)), SUPERVISE)

    def _supervised_specs(self, run: str) -> list[ReplicaSpec]:
        """The specs that a supervisor may launch here, one of each kind: a replica and the publisher per place."""
        from executors.platforms.multi import places_of  # which imports us
        from rendezvous.membership import read_control
        from rendezvous.seal import open_signed

        here = [p for p in places_of(read_control(open_signed(run)).places) if p.executor == self.name]
        return [
            ReplicaSpec(run, "r00", env=p.env, gpu=gpu, timeout_s=p.timeout_s, secrets=p.secrets)
            for p in here
            for gpu in (p.gpu, ())
        ]

    def _prepare_launch(
        self, run: str, specs: Sequence[ReplicaSpec], like: Sequence[ReplicaSpec] = (), function: str = ""
    ) -> dict[tuple[str, int], dict[str, Any]]:
        """Deploy what is missing to launch these; -> what has been launched before.

        function: in this one, which will launch what is `like` those.  Inside a container nothing is deployed.
        """
        with translated_errors():
            return ask_patiently(lambda: self._missing_deployed(run, specs, like, function), self._clock)

    def _missing_deployed(
        self, run: str, specs: Sequence[ReplicaSpec], like: Sequence[ReplicaSpec], function: str
    ) -> dict[tuple[str, int], dict[str, Any]]:
        launched, newest = self._register_of(run, create=True).look()
        new = [s for s in specs if (s.slot, s.attempt) not in launched]
        if new:
            self._ensure_functions(run, like if function else new, function)
            higher = {s.slot: s.attempt for s in new if s.attempt > newest.get(s.slot, 0)}
            self._register_of(run).announce(higher)
        return launched

    def _ensure_functions(self, run: str, specs: Sequence[ReplicaSpec], function: str) -> None:
        """Have the functions of these specs in the app, and look them up."""
        functions = {self._kind_of(s).function for s in specs} | ({function} if function else set())
        needed = functions | {s.entrypoint.partition(".")[0] for s in specs}
        if needed <= self._deployed.get(run, set()):
            return
        if not inside_container() and not self._is_deployed(run, specs, functions):
            self._deploy_app(run, specs)
        for name in functions:
            self._functions[run, name] = sdk().Function.from_name(app_name(run), name).hydrate()
        self._deployed.setdefault(run, set()).update(needed)

    def _is_deployed(self, run: str, specs: Sequence[ReplicaSpec], functions: set[str]) -> bool:
        """Is all of it there, from this very code?  A deploy under calls that run is a risk, so none is made then."""
        register = self._register_of(run)
        mine = self._fingerprint_of(specs)
        kinds = self._expected_kinds(run, specs)
        if not mine or register.fingerprint() != mine or not kinds <= set(register.kinds()):
            return False
        if not self._object_ids(run, kinds).items() <= register.objects().items():
            return False
        with suppress(sdk().exception.NotFoundError):  # somebody stopped the app
            for name in functions:
                sdk().Function.from_name(app_name(run), name).hydrate()
            return True
        return False

    def _expected_kinds(self, run: str, specs: Sequence[ReplicaSpec]) -> set[Kind]:
        """The kinds of these launches, and of the expected ones."""
        return {self._kind_of(s) for s in specs} | self._expected.get(run, set())

    def _fingerprint_of(self, specs: Sequence[ReplicaSpec]) -> str:
        return fingerprint(self._image, self._pip, [s.entrypoint for s in specs])

    def _deploy_app(self, run: str, specs: Sequence[ReplicaSpec]) -> None:
        modal = sdk()
        name = app_name(run)
        wanted = self._expected_kinds(run, specs)
        self._object_ids(run, wanted)  # a missing secret is said before anything is made
        kinds = sorted(wanted | self._still_there(run), key=lambda k: k.function)
        secrets = tuple(sorted({secret for kind in (*kinds, self._default) for secret in kind.secrets}))
        image = with_source(image_of(self._image, self._pip), [s.entrypoint for s in specs])
        app = modal.App(name, tags={"diloco": name})
        for kind in kinds:
            app.function(name=kind.function, image=image, **kind.options())(modal_app.replica)
        small = replace(self._default, secrets=secrets).small
        app.function(name=SUPERVISE, image=image, **small.options())(modal_app.supervise)
        with redirect_stdout(sys.stderr), modal.enable_output():  # a build takes minutes: it is shown
            app.deploy()
        self._register_of(run).deployed(kinds, self._fingerprint_of(specs), self._object_ids(run, kinds))

    def _object_ids(self, run: str, kinds: Iterable[Kind]) -> dict[str, str]:
        """ "secret/NAME", "volume/NAME" -> id, of all that these and the supervisor need; volumes are made.

        Raises ExecutorError if a secret is not there.
        """
        kinds = (*kinds, self._default)
        secrets = {name for kind in kinds for name in kind.secrets}
        found = {f"secret/{name}": check_secret(name, run) for name in sorted(secrets)}
        return found | {f"volume/{name}": volume_id(name) for kind in kinds if (name := kind.hub_cache)}

    def _still_there(self, run: str) -> set[Kind]:
        """Kinds that were deployed before: their calls may still run, so they stay in the app."""
        return {k for k in self._register_of(run).kinds() if all(_has_secret(s) for s in k.secrets)}

    def _launch_one(
        self, spec: ReplicaSpec, why_not: str, known: Mapping[str, Any] | None, function: str = ""
    ) -> Handle:
        """One replica; a launch that is known already is not repeated."""
        kind = self._kind_of(spec)
        name = app_name(spec.run)
        price = (kind.small if function else kind).usd_per_hour(self._prices)
        crashes = SUPERVISOR_CRASHES if function else modal_app.CRASHES
        note = Note(name, self._clock.wall(), price, crashes)
        handle = Handle(spec.run, spec.slot, spec.attempt, self.name, launched_at=note.launched_at, usd_per_hour=price)
        if why_not:
            return self._failed_handle(handle, why_not)
        timed = replace(spec, timeout_s=spec.timeout_s or kind.timeout_s)
        try:
            known = known or self._spawn_call(timed, note, function or kind.function)
        except Exception as error:  # the connection, the service, a function that is not there
            self._deployed.pop(spec.run, None)
            if no_answer(error):  # nobody's fault, and perhaps it was started: its container would tell
                return self._failed_handle(handle, f"Modal gave no answer to its launch: {error}", State.LOST)
            return self._failed_handle(handle, f"Modal did not start it: {error}")
        return _handle_from_entry(spec.run, spec.slot, spec.attempt, known)

    def _failed_handle(self, handle: Handle, why: str, state: State = State.FAILED) -> Handle:
        self._failed[handle] = Status(handle, state, why)
        return handle

    def _spawn_call(self, spec: ReplicaSpec, note: Note, function: str) -> dict[str, Any]:
        """-> its entry in the register.  If somebody was faster, ours would go by itself; ending it saves its start."""
        run = self._functions[spec.run, function]
        call = ask_patiently(lambda: run.spawn(spec.to_dict(), note.to_dict()), self._clock)
        entry = ask_patiently(lambda: self._register_of(spec.run).claim(spec, call.object_id, note), self._clock)
        if entry["call"] != call.object_id:
            call.cancel(terminate_containers=True)
        return entry

    def _register_of(self, run: str, create: bool = False) -> Register:
        """create: if there is none; only a launch does."""
        return self._registers.setdefault((run, create), Register.open(app_name(run), create))

    # ------------------------------------------------------------------ watching

    def poll(self, handles: Iterable[Handle]) -> list[Status]:
        self._enforce_deadlines()
        handles = list(handles)
        found = self._at_once(self._status_of, handles)
        return [_stale_status(h, self._last.get(h)) if s is None else s for h, s in zip(handles, found, strict=True)]

    def _status_of(self, handle: Handle) -> Status:
        if handle in self._ended:
            return self._ended[handle][0]
        if not handle.native:
            return self._failed.get(handle) or Status(handle, State.FAILED, "it was not started")
        last = self._last.get(handle)
        began = last is not None and last.state is State.RUNNING
        try:
            status, end = modal_calls.look_up_call(handle, self._register_of(handle.run), began)
        except Exception as error:  # what became of the call is data; this is about the way there
            return _stale_status(handle, last, error)
        self._last[handle] = status
        if status.state.ended:
            self._ended[handle] = (status, end)
        return status

    def collect(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Result]:
        statuses = wait_for_all(lambda: self.poll(handles), self._clock, timeout, COLLECT_S)
        return [self._make_result(s, timeout) for s in statuses]

    def _make_result(self, status: Status, timeout: float | None) -> Result:
        handle = status.handle
        reason = status.reason
        if not status.state.ended:
            reason = f"still running after {timeout:g} s"
        end = self._ended[handle][1] if handle in self._ended else {}
        tail = tuple(end.get("tail", ()))
        if not tail and status.state is not State.SUCCEEDED:
            with suppress(ExecutorError):
                tail = tuple(self.logs(handle, TAIL))
        return Result(handle, status.state, reason, status.exit_code, end.get("value"), tail)

    def logs(self, handle: Handle, tail: int | None = None) -> list[str]:
        if not handle.native:
            return self._failed[handle].reason.splitlines() if handle in self._failed else []
        if tail == 0:
            return []
        lines = modal_calls.lines_of(modal_calls.log_entries(handle, self._clock, tail=tail))
        return lines if tail is None else lines[-tail:]

    def follow(self, handle: Handle, tail: int | None = None) -> Iterator[str]:
        if not handle.native:
            return iter(self.logs(handle, tail))
        follower = modal_calls.Follower(handle, self._clock)
        return follower.follow(lambda: self.poll([handle])[0].state.ended, tail)

    # ------------------------------------------------------------------ ending

    def cancel(self, handles: Iterable[Handle], grace_s: float = 15.0) -> None:
        until = self._clock.now() + grace_s
        there = [h for h in handles if h.native and h not in self._ended]
        for handle in there:
            self._deadlines[handle] = min(until, self._deadlines.get(handle, until))
        if grace_s > 0:
            self._at_once(self._cancel_call, there)
        self._enforce_deadlines()

    def _cancel_call(self, handle: Handle, terminate: bool = False) -> None:
        with suppress(Exception):  # who cannot be reached ends at a later poll, or by its lease
            self._register_of(handle.run).ask(handle.slot, handle.attempt)
            sdk().FunctionCall.from_id(handle.native).cancel(terminate_containers=terminate)
            if terminate:
                self._deadlines.pop(handle, None)

    def _enforce_deadlines(self) -> None:
        due = [h for h, until in list(self._deadlines.items()) if self._clock.now() >= until]
        for handle in [h for h in due if h in self._ended]:
            del self._deadlines[handle]
        self._at_once(lambda h: self._cancel_call(h, terminate=True), [h for h in due if h not in self._ended])

    def find(self, run: str) -> list[Handle]:
        newest: dict[str, Handle] = {}
        with translated_errors():
            try:
                launched, _ = ask_patiently(Register.open(app_name(run), create=False).look, self._clock)
            except sdk().exception.NotFoundError:
                return []
        for (slot, attempt), entry in launched.items():
            if slot not in newest or attempt > newest[slot].attempt:
                newest[slot] = _handle_from_entry(run, slot, attempt, entry)
        return [newest[slot] for slot in sorted(newest)]

    def orphans(self, run: str, known: Collection[Handle]) -> list[Handle]:
        """Second calls of one launch whose containers were started."""
        try:
            new = self._twins.new(run, self._register_of(run))
        except sdk().exception.NotFoundError:  # nothing was ever launched, or it was purged
            return []
        except Exception as error:  # as a poll that got no answer
            if no_answer(error):
                return []
            raise
        return [h for h in new if h.native not in {k.native for k in known}]

    def sweep(self, run: str) -> list[str]:
        """Noted calls are cancelled; if there are calls that nobody noted, the app is stopped, and they end with it."""
        with translated_errors():
            try:
                register = Register.open(app_name(run), create=False)
                launched, _ = ask_patiently(register.look, self._clock)
            except sdk().exception.NotFoundError:
                return []
            handles = [_handle_from_entry(run, slot, n, entry) for (slot, n), entry in launched.items()]
            alive = [s.handle for s in self.poll(handles) if not s.state.ended]
            nameless = ask_patiently(lambda: count_inputs(run, register), self._clock) - len(alive)
            self._at_once(lambda h: self._cancel_call(h, terminate=True), alive)
            if nameless > 0:
                self.shutdown(run)
        found = [f"{h.slot}.{h.attempt}: {h.native} on {self.name}" for h in alive]
        return [*found, *([f"{nameless} calls of {app_name(run)} that no launch names"] if nameless > 0 else [])]

    def shutdown(self, run: str) -> None:
        """End everything of a run, also calls that nobody noted: its app is stopped."""
        self._at_once(lambda h: self._register_of(run).ask(h.slot, h.attempt), self.find(run))
        with translated_errors(), suppress(sdk().exception.NotFoundError):
            ask_patiently(lambda: sdk().App.lookup(app_name(run)).stop(), self._clock)
        self._deployed.pop(run, None)

    def purge(self, run: str) -> list[str]:
        """The app, with everything that may still run in it, and then its register."""
        name = app_name(run)
        e = sdk().exception
        removed = list[str]()
        with translated_errors():
            with suppress(e.NotFoundError):
                ask_patiently(lambda: sdk().App.lookup(name).stop(), self._clock)
                removed.append(f"removed the app {name} from Modal")
            with suppress(e.NotFoundError):
                ask_patiently(lambda: sdk().Dict.objects.delete(name), self._clock)
                removed.append(f"removed the dict {name} from Modal, which said what was launched")
        self._deployed.pop(run, None)
        self._registers = {key: register for key, register in self._registers.items() if key[0] != run}
        return removed

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _at_once(self, act: Callable[[Handle], T], handles: Iterable[Handle]) -> list[T | None]:
        """For each; None where there was no answer in time."""
        futures: list[Future[T]] = [self._threads.submit(act, h) for h in handles]
        wait(futures, timeout=ANSWER_S)
        return [f.result() if f.done() else (f.cancel(), None)[1] for f in futures]


def _has_secret(name: str) -> bool:
    try:
        check_secret(name, "")
    except ExecutorError:
        return False
    return True


def _handle_from_entry(run: str, slot: str, attempt: int, entry: Mapping[str, Any]) -> Handle:
    known = {"native": entry["call"], "launched_at": entry["launched_at"], "usd_per_hour": entry["usd_per_hour"]}
    return Handle(run, slot, attempt, ModalExecutor.name, **known)


def _stale_status(handle: Handle, last: Status | None, error: Exception | None = None) -> Status:
    known = last or Status(handle, State.PENDING)
    if error is not None and is_access_denied(error):
        return unanswered(known, access_denied_error(error))
    why = f"Modal did not answer: {error or f'nothing for {ANSWER_S:.0f} s'}"
    return unanswered(replace(known, reason=why), why)


def _secret_advice(specs: Sequence[ReplicaSpec], kinds: Sequence[Kind]) -> list[str]:
    run = specs[0].run if specs else ""
    if run.partition("://")[0] in SECRET_KEYS and not all(k.secrets for k in kinds):
        return [f"no secret is given, and containers need the store's keys: {how_to_create('storage', run)}"]
    return []

"""Replicas as function calls on Modal.

    specs ──▶ checked ──▶ app deployed, once ──▶ spawn per replica, all at once ──▶ handles, native = FunctionCall id
                                                    └─ dict: which call runs which launch (app.py)
    poll     the status of each call, all at once (calls.py)
    cancel   interrupts the input; after `grace_s` a later poll ends the container

Calls of a deployed app continue if this process ends, and the dict lets another process find them.  Modal itself
starts a preempted or crashed input again, under the same handle; the number of crashes is limited.

Not promised: that a RUNNING call has a container: after a preemption, no container exists until the next start.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from diloco.runlog.reader import SUPERVISOR
from executors.platforms.base import ExecutorError, Handle, ReplicaSpec, Result, State, Status, unanswered
from executors.platforms.executor import Executor, launch_of
from executors.platforms.on_modal import app as modal_app
from executors.platforms.on_modal import calls as modal_calls
from executors.platforms.on_modal import client as modal_client
from executors.platforms.on_modal.app import PREFIX, SUPERVISE, Register, app_name, handle_of
from executors.platforms.on_modal.client import ask_patiently, no_answer, sdk, translated_errors
from executors.platforms.on_modal.deployment import Deployments
from executors.platforms.on_modal.kinds import AS_OF, CORES, DAY_S, MEMORY_MIB, Kind, price_fault
from executors.platforms.packages.versions import pinned_version
from executors.platforms.platform import NotStarted
from rendezvous.clock import Clock
from rendezvous.stores.open import stays_here

AT_ONCE = 32
ANSWER_S = 20.0  # time limit of a poll's requests; a status without an answer by then is stale
T = TypeVar("T")


class ModalExecutor(Executor):
    """The executor for Modal.

    image: a modal.Image, or an image's name in a registry (default: Debian with the versions installed here).
    gpu, secrets, timeout_s: defaults for specs.  gpu: kinds in order of preference; Modal takes a free one.
    region: e.g. "us"; it costs more.   cores, memory_mib: reserved per container.   prices: {"H100": 3.50, …}.
    max_cores, max_memory_mib: limits of the billed use (default: twice the cores; 16 GiB, or memory_mib if larger).
    pip: packages that your own reward needs, in addition to those of the project.
    vllm: replicas generate with vLLM; their image has the versions of packages/versions.py.
    hub_cache: a Volume that keeps downloads from the Hugging Face Hub; made if missing ("": no Volume).
    """

    name = modal_app.NAME
    first_state = State.PENDING
    labelled = True
    hosts_supervisor = True

    def __init__(
        self,
        image: Any = None,
        *,
        gpu: str | Sequence[str] = (),
        secrets: Sequence[str] = (),
        timeout_s: float = DAY_S,
        region: str = "",
        cores: float = CORES,
        memory_mib: int = 8192,
        max_cores: float = 0.0,
        max_memory_mib: int = 0,
        pip: Sequence[str] = (),
        vllm: bool = False,
        hub_cache: str = "",
        prices: Mapping[str, float] | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(clock)
        self._prices = dict(prices or {})
        gpus = (gpu,) if isinstance(gpu, str) else tuple(gpu)
        most = {"max_cores": max_cores or 2.0 * cores, "max_memory_mib": max_memory_mib or max(MEMORY_MIB, memory_mib)}
        size = {"cores": float(cores), "memory_mib": memory_mib, **most}
        self._default = Kind(gpus, float(timeout_s), tuple(secrets), region, hub_cache=hub_cache, **size)
        if why := price_fault(self._prices) or self._default.fault:
            raise ExecutorError(why)
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="modal")
        packages = (pip,) if isinstance(pip, str) else pip
        self._apps = Deployments(image, packages, self._default, self._clock, vllm=vllm)
        self._ends: dict[str, Mapping[str, Any]] = {}  # call -> its end, with its value and its last lines
        self._duplicates = modal_calls.Duplicates(self._clock)

    # ------------------------------------------------------------------ what a launch would do

    def plan_line(self, spec: ReplicaSpec) -> str:
        return self._apps.kind_of(spec).words(self.price_of(spec))

    def plan_notes(self, specs: Sequence[ReplicaSpec]) -> list[str]:
        kinds = [self._apps.kind_of(s) for s in specs]
        without_fault = any(not self.fault_of(s) for s in specs)
        if without_fault and not modal_client.inside_container():  # before a price is shown
            modal_client.check_account(sorted({name for kind in kinds for name in kind.secrets}), specs[0].run)
        apps = ", ".join(sorted({app_name(s.run) for s in specs}))
        lines = [f"app {apps}; prices as of {AS_OF}, see modal.com/pricing", *_secret_advice(specs, kinds)]
        if volumes := sorted({k.hub_cache for k in kinds if k.hub_cache}):
            names = ", ".join(volumes)
            lines.append(f"downloads from the Hugging Face Hub stay in the Volume {names}, for later runs")
        if pip := self._apps.pip:
            lines.append(f"the image has this project's requirements, and {', '.join(pip)}")
        if self._apps.vllm:
            lines.append(f"the image has {pinned_version('vllm')} and {pinned_version('transformers')}")
        return lines

    def price_of(self, spec: ReplicaSpec) -> float | None:
        kind = self._apps.kind_of(spec)
        return (kind.small if spec.slot == SUPERVISOR else kind).usd_per_hour(self._prices)

    def new_handle(self, spec: ReplicaSpec) -> Handle:
        return replace(super().new_handle(spec), usd_per_hour=self.price_of(spec))

    def fault_of(self, spec: ReplicaSpec) -> str:
        if spec.run and stays_here(spec.run):
            return (
                f"{spec.run} is on this machine, and Modal's containers cannot reach it. Put the run into a bucket, "
                "e.g. --run s3://BUCKET/NAME, and give them its keys as a secret"
            )
        return self._apps.kind_of(spec).fault

    # ------------------------------------------------------------------ starting

    def submit(self, specs: Sequence[ReplicaSpec]) -> list[Handle | NotStarted]:
        known: dict[tuple[str, str, int], Mapping[str, Any]] = {}
        for run in {s.run for s in specs}:
            before = self._apps.prepare(run, [s for s in specs if s.run == run])
            known |= {(run, *key): entry for key, entry in before.items()}
        prices = map(self.price_of, specs)
        return list(self._threads.map(self._apps.launch, specs, prices, [known.get(launch_of(s)) for s in specs]))

    def expect(self, specs: Sequence[ReplicaSpec]) -> None:
        self._apps.expect(specs)

    def start_supervisor(self, spec: ReplicaSpec, replicas: Sequence[ReplicaSpec]) -> Handle:
        """Start the supervisor's small function.  Outside a container, first deploy the replicas' functions, too."""
        spec = replace(spec, secrets=(), timeout_s=spec.timeout_s or DAY_S)
        if why := self.fault_of(spec):
            raise ExecutorError(why)
        launched = self._apps.prepare(spec.run, [spec], [] if modal_client.inside_container() else replicas, SUPERVISE)
        answer = self._apps.launch(spec, self.price_of(spec), launched.get((SUPERVISOR, spec.attempt)))
        return self.known.keep(spec, answer, self._clock.wall())

    def renew(self, handles: Sequence[Handle], until: float) -> bool:
        with translated_errors("renew the lease"):
            for run in {h.run for h in handles}:
                ask_patiently(lambda run=run: self._apps.register_of(run, create=True).renew(until), self._clock)
        return True

    # ------------------------------------------------------------------ watching

    def observe(self, handles: Sequence[Handle]) -> list[Status]:
        last = {h: self.known.last_status(h) for h in handles}
        looks = _at_once(self._threads, lambda h: _look_at(self._apps, h, last[h]), handles)
        seen = {h: look or (_stale_status(last[h]), None) for h, look in zip(handles, looks, strict=True)}
        self._ends |= {h.native: end for h, (_, end) in seen.items() if end is not None}
        return [seen[h][0] for h in handles]

    def read_value(self, handle: Handle) -> Any:
        return self._ends.get(handle.native, {}).get("value")

    def read_log(self, handle: Handle, tail: int | None = None) -> list[str]:
        found = modal_calls.log_entries(handle, self._clock, tail=tail)
        return "".join([str(entry.message) for entry in found]).splitlines()

    def follow_log(self, handle: Handle, tail: int | None, ended: Callable[[], bool]) -> Iterator[str]:
        return modal_calls.Follower(handle, self._clock).follow(ended, tail)

    def make_result(self, status: Status) -> Result:
        """Return the result, with the last lines from the container's end if the container reported one."""
        tail = tuple(self._ends.get(status.handle.native, {}).get("tail", ()))
        if tail:
            return Result(status.handle, status.state, status.reason, status.exit_code, tail=tail)
        return super().make_result(status)

    # ------------------------------------------------------------------ ending

    def stop(self, handles: Sequence[Handle], kill: bool) -> list[Handle]:
        heard = _at_once(self._threads, lambda h: _cancel_call(self._apps, h, terminate=kill), handles)
        return [h for h, was_heard in zip(handles, heard, strict=True) if not was_heard]

    def discover(self, run: str) -> list[Handle]:
        with translated_errors("list the run's launches"):
            try:
                launched, _ = ask_patiently(Register.open(app_name(run), create=False).look, self._clock)
            except sdk().exception.NotFoundError:
                return []
        handles = [handle_of(run, slot, attempt, entry) for (slot, attempt), entry in launched.items()]
        return sorted(handles, key=lambda handle: handle.attempt)

    def orphans(self, run: str, known: Collection[Handle]) -> list[Handle]:
        """Return duplicate calls whose containers were started."""
        try:
            new = self._duplicates.new(run, self._apps.register_of(run))
        except sdk().exception.NotFoundError:  # nothing was launched, or the run was purged
            return []
        except Exception as error:  # without an answer there is no news, as in a poll
            if no_answer(error):
                return []
            raise
        return [h for h in new if h.native not in {k.native for k in known}]

    def sweep(self, run: str) -> list[str]:
        """Cancel the registered calls; if there are other calls, stop the app, which ends them."""
        with translated_errors("end the run's calls"):
            try:
                register = Register.open(app_name(run), create=False)
                launched, _ = ask_patiently(register.look, self._clock)
            except sdk().exception.NotFoundError:
                return []
            handles = [handle_of(run, slot, n, entry) for (slot, n), entry in launched.items()]
            alive = [s.handle for s in self.poll(handles) if not s.state.ended]
            nameless = ask_patiently(lambda: modal_calls.count_inputs(run, register), self._clock) - len(alive)
            _at_once(self._threads, lambda h: _cancel_call(self._apps, h, terminate=True), alive)
            if nameless > 0:
                self.shutdown(run)
        found = [f"{h.slot}.{h.attempt}: {h.native} on {self.name}" for h in alive]
        return [*found, *([f"{nameless} calls of {app_name(run)} that no launch names"] if nameless > 0 else [])]

    def sweep_all(self, dry_run: bool = False) -> list[str]:
        """End all apps of this project in this Modal environment; with `dry_run`, only list them."""
        names = [name for name in modal_client.live_apps() if name.startswith(PREFIX)]
        with translated_errors("stop the apps"):
            for name in () if dry_run else names:
                modal_client.stop_app(name, self._clock)
        return [f"the app {name} on {self.name}, with all that runs in it" for name in names]

    def shutdown(self, run: str) -> None:
        """End all calls of a run, also unregistered calls, by stopping its app."""
        _at_once(self._threads, lambda h: self._apps.register_of(run).ask(h.slot, h.attempt), self.find(run))
        with translated_errors("stop the run's app"):
            modal_client.stop_app(app_name(run), self._clock)
        self._apps.doubt(run)

    def purge(self, run: str) -> list[str]:
        """Remove the app, with all calls that may still run in it, and then its register."""
        name = app_name(run)
        removed = list[str]()
        with translated_errors("remove the run's app"):
            if modal_client.stop_app(name, self._clock):
                removed.append(f"removed the app {name} from Modal")
            with suppress(sdk().exception.NotFoundError):
                ask_patiently(lambda: sdk().Dict.objects.delete(name), self._clock)
                removed.append(f"removed the dict {name} from Modal, the register of the launches")
        self._apps.forget(run)
        self.known.forget(run)
        return removed

    def close(self) -> None:
        super().close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_at(apps: Deployments, handle: Handle, last: Status) -> tuple[Status, Mapping[str, Any] | None]:
    """Return the status of a call, and its end: {} while it runs, None if Modal does not answer."""
    try:
        return modal_calls.look_up_call(handle, apps.register_of(handle.run), last.state is State.RUNNING)
    except Exception as error:  # Modal could not be asked; the end of a call is returned, never raised
        return _stale_status(last, error), None


def _cancel_call(apps: Deployments, handle: Handle, terminate: bool) -> bool:
    with suppress(Exception):  # a call that cannot be reached ends at a later poll, or by its lease
        register = apps.register_of(handle.run)
        if not register.names(handle):  # the call is another run's: only a log names it as ours
            return True
        register.ask(handle.slot, handle.attempt)
        sdk().FunctionCall.from_id(handle.native).cancel(terminate_containers=terminate)
        return True
    return False


def _at_once(threads: ThreadPoolExecutor, act: Callable[[Handle], T], handles: Iterable[Handle]) -> list[T | None]:
    """Return the answer for each handle; None if it did not come in time."""
    futures: list[Future[T]] = [threads.submit(act, h) for h in handles]
    wait(futures, timeout=ANSWER_S)
    return [f.result() if f.done() else (f.cancel(), None)[1] for f in futures]


def _stale_status(known: Status, error: Exception | None = None) -> Status:
    if error is not None and modal_client.is_access_denied(error):
        return unanswered(known, modal_client.access_denied_error(error))
    why = f"Modal did not answer: {error or f'nothing for {ANSWER_S:.0f} s'}"
    return unanswered(replace(known, reason=why), why)


def _secret_advice(specs: Sequence[ReplicaSpec], kinds: Sequence[Kind]) -> list[str]:
    run = specs[0].run if specs else ""
    if run.partition("://")[0] in modal_client.SECRET_KEYS and not all(k.secrets for k in kinds):
        way = modal_client.how_to_create("storage", run)
        return [f"no secret is given, and containers need the store's keys: {way}"]
    return []

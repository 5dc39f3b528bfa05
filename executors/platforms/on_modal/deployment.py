"""The apps of runs on Modal: one per run, deployed only if it lacks something that a launch needs.

    specs ──▶ kinds of containers ─┬─ the register says that they were deployed from the same code ─▶ functions
                                   └─ else ─▶ image, secrets, volumes ─▶ deploy, with the kinds deployed before

A deploy while calls run is a risk, so a launch deploys only if it must.  Code inside a container deploys nothing.

Not promised: that running containers see a secret that is changed after a deploy.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from typing import Any

from executors.platforms.base import ExecutorError, Handle, ReplicaSpec, State
from executors.platforms.on_modal import app as modal_app
from executors.platforms.on_modal import client as modal_client
from executors.platforms.on_modal.app import SUPERVISE, Note, Register, app_name, handle_of
from executors.platforms.on_modal.client import ask_patiently, sdk, translated_errors
from executors.platforms.on_modal.image import fingerprint, image_of, with_source
from executors.platforms.on_modal.kinds import Kind
from executors.platforms.platform import NotStarted
from rendezvous.clock import Clock
from rendezvous.layout import SUPERVISOR

SUPERVISOR_CRASHES = 10
AGAIN = 9  # times that Modal calls a supervisor's function again after it has raised


class Deployments:
    """The apps of one executor.   default: values that a spec leaves open.   image, pip: as in `image_of` (image.py).

    vllm: replicas generate with vLLM, so their image has other versions than the supervisor's."""

    def __init__(self, image: Any, pip: Sequence[str], default: Kind, clock: Clock, *, vllm: bool = False) -> None:
        self.pip = tuple(pip)
        self.vllm = vllm
        self._image = image
        self._default = default
        self._clock = clock
        self._registers: dict[tuple[str, bool], Register] = {}
        self._deployed: dict[str, set[str]] = {}  # run -> functions, and packages of entry points
        self._expected: dict[str, set[Kind]] = {}  # run -> kinds that will be launched later
        self._functions: dict[tuple[str, str], Any] = {}

    def kind_of(self, spec: ReplicaSpec) -> Kind:
        default = self._default
        return replace(
            default,
            gpu=tuple(spec.gpu) or default.gpu,
            timeout_s=float(spec.timeout_s) or default.timeout_s,
            secrets=tuple(spec.secrets) or default.secrets,
        )

    def expect(self, specs: Sequence[ReplicaSpec]) -> None:
        """Remember specs of later launches, so that the next deploy includes their kinds of containers."""
        for spec in specs:
            self._expected.setdefault(spec.run, set()).add(self.kind_of(spec))

    def prepare(
        self, run: str, specs: Sequence[ReplicaSpec], like: Sequence[ReplicaSpec] = (), function: str = ""
    ) -> dict[tuple[str, int], dict[str, Any]]:
        """Deploy the missing functions for these specs; return the launches so far.

        function: the supervisor's function if `specs` start a supervisor; else "".   like: specs for it to launch.
        """
        with translated_errors("prepare a launch"):
            return ask_patiently(lambda: self._missing_deployed(run, specs, like, function), self._clock)

    def _missing_deployed(
        self, run: str, specs: Sequence[ReplicaSpec], like: Sequence[ReplicaSpec], function: str
    ) -> dict[tuple[str, int], dict[str, Any]]:
        launched, newest = self.register_of(run, create=True).look()
        new = [s for s in specs if (s.slot, s.attempt) not in launched]
        if new:
            self._ensure_functions(run, like if function else new, function)
            higher = {s.slot: s.attempt for s in new if s.attempt > newest.get(s.slot, 0)}
            self.register_of(run).announce(higher)
        return launched

    def _ensure_functions(self, run: str, specs: Sequence[ReplicaSpec], function: str) -> None:
        """Deploy the functions of these specs unless the app has them, and look them up."""
        functions = {self.kind_of(s).function for s in specs} | ({function} if function else set())
        needed = functions | {s.entrypoint.partition(".")[0] for s in specs}
        if needed <= self._deployed.get(run, set()):
            return
        if not modal_client.inside_container() and not self._is_deployed(run, specs, functions):
            self._deploy_app(run, specs)
        for name in functions:
            self._functions[run, name] = sdk().Function.from_name(app_name(run), name).hydrate()
        self._deployed.setdefault(run, set()).update(needed)

    def _is_deployed(self, run: str, specs: Sequence[ReplicaSpec], functions: set[str]) -> bool:
        """Whether the app has all functions and objects for these specs, deployed from the present code."""
        register = self.register_of(run)
        mine = self._fingerprint_of(specs)
        kinds = self._expected_kinds(run, specs)
        if not mine or register.fingerprint() != mine or not kinds <= set(register.kinds()):
            return False
        if not self._object_ids(run, kinds).items() <= register.objects().items():
            return False
        with suppress(sdk().exception.NotFoundError):  # the app was stopped
            for name in functions:
                sdk().Function.from_name(app_name(run), name).hydrate()
            return True
        return False

    def _expected_kinds(self, run: str, specs: Sequence[ReplicaSpec]) -> set[Kind]:
        """Return the kinds of these launches, and of the expected ones."""
        return {self.kind_of(s) for s in specs} | self._expected.get(run, set())

    def _fingerprint_of(self, specs: Sequence[ReplicaSpec]) -> str:
        return fingerprint(self._image, self.pip, [s.entrypoint for s in specs], vllm=self.vllm)

    def _deploy_app(self, run: str, specs: Sequence[ReplicaSpec]) -> None:
        modal = sdk()
        name = app_name(run)
        wanted = self._expected_kinds(run, specs)
        self._object_ids(run, wanted)  # raises for a missing secret before the deploy
        before = {k for k in self.register_of(run).kinds() if all(_has_secret(s) for s in k.secrets)}  # may still run
        kinds = sorted(wanted | before, key=lambda k: k.function)
        secrets = tuple(sorted({secret for kind in (*kinds, self._default) for secret in kind.secrets}))
        entrypoints = [s.entrypoint for s in specs]
        image = with_source(image_of(self._image, self.pip, vllm=self.vllm), entrypoints)
        plain = with_source(image_of(self._image, self.pip), entrypoints) if self.vllm else image
        app = modal.App(name, tags={"diloco": name})
        for kind in kinds:
            app.function(name=kind.function, image=image, **kind.options())(modal_app.replica)
        small = replace(self._default, secrets=secrets).small
        app.function(name=SUPERVISE, image=plain, retries=AGAIN, **small.options())(modal_app.supervise)
        with redirect_stdout(sys.stderr), modal.enable_output():  # show the build, which takes minutes
            app.deploy()
        self.register_of(run).deployed(kinds, self._fingerprint_of(specs), self._object_ids(run, kinds))

    def _object_ids(self, run: str, kinds: Iterable[Kind]) -> dict[str, str]:
        """Return "secret/NAME", "volume/NAME" -> id, for these kinds and the supervisor; make missing volumes.

        Raise ExecutorError if a secret does not exist.
        """
        kinds = (*kinds, self._default)
        secrets = {name for kind in kinds for name in kind.secrets}
        found = {f"secret/{name}": modal_client.check_secret(name, run) for name in sorted(secrets)}
        return found | {f"volume/{name}": modal_client.volume_id(name) for kind in kinds if (name := kind.hub_cache)}

    def register_of(self, run: str, create: bool = False) -> Register:
        """Return the register of a run.   create: make a missing register; launches and lease renewals set this."""
        return self._registers.setdefault((run, create), Register.open(app_name(run), create))

    def launch(self, spec: ReplicaSpec, price: float | None, known: Mapping[str, Any] | None) -> Handle | NotStarted:
        """Start one process.   known: the launch's entry if it was started before; then start nothing."""
        kind = self.kind_of(spec)
        watches = spec.slot == SUPERVISOR
        note = Note(app_name(spec.run), self._clock.wall(), price, SUPERVISOR_CRASHES if watches else modal_app.CRASHES)
        timed = replace(spec, timeout_s=spec.timeout_s or kind.timeout_s)
        try:
            known = known or self._spawn(timed, note, SUPERVISE if watches else kind.function)
        except Exception as error:  # the connection or the service failed, or the function does not exist
            self.doubt(spec.run)
            if modal_client.no_answer(error):  # not the replica's fault; a call that started registers the launch
                return NotStarted(f"Modal gave no answer to its launch: {error}", State.LOST)
            return NotStarted(f"Modal did not start it: {error}")
        return handle_of(spec.run, spec.slot, spec.attempt, known)

    def _spawn(self, spec: ReplicaSpec, note: Note, function: str) -> dict[str, Any]:
        """Spawn a call; return the launch's entry in the register.

        If another call was faster, cancel ours, which would otherwise end only after its container's start.
        """
        run = self._functions[spec.run, function]
        call = ask_patiently(lambda: run.spawn(spec.to_dict(), note.to_dict()), self._clock)
        entry = ask_patiently(lambda: self.register_of(spec.run).claim(spec, call.object_id, note), self._clock)
        if entry["call"] != call.object_id:
            call.cancel(terminate_containers=True)
        return entry

    def doubt(self, run: str) -> None:
        """Forget that the app was seen, so that the next launch checks whether it exists."""
        self._deployed.pop(run, None)

    def forget(self, run: str) -> None:
        """Forget a run whose app and register were removed."""
        self.doubt(run)
        self._registers = {key: register for key, register in self._registers.items() if key[0] != run}


def _has_secret(name: str) -> bool:
    try:
        modal_client.check_secret(name, "")
    except ExecutorError:
        return False
    return True

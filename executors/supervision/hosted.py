"""Runs a run's supervisor on a platform: as a small function on Modal, or as a job on Hugging Face.

    start_hosted(executor, run) ─┬─ a supervisor runs there ─▶ its handle
                                 └─ else ─▶ a spec with its replicas' settings ─▶ executor.start_supervisor
    the time limit is near      ─▶ the supervisor ends with RESUME; its container starts the next one (start_next)

    python -m executors.supervision.hosted SPEC PLATFORM OPTIONS       a job; the platform restarts it unless it exits 0

A platform imports this module by its name, as it imports entry points.

Not promised: a supervisor at every moment; between two supervisors replicas continue, until their lease ends.
"""

import json
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from diloco.process import exitcodes
from diloco.runlog.reader import SUPERVISOR
from executors.platforms import container
from executors.platforms.base import ExecutorError, FleetExecutor, Handle, ReplicaSpec
from executors.platforms.places import Place, make_executor, places_of
from executors.supervision.holder import supervisor_of
from executors.supervision.slots.slot_state import LOST_LEASE
from rendezvous.agreement.membership import read_control
from rendezvous.errors import RendezvousError, StoreRefused
from rendezvous.stores.run_key import open_signed

ENTRYPOINT = "executors.supervision.supervisor:main"
TRIES = 6
AGAIN_S = 20.0  # seconds between tries; all tries together fit into the time that a container has left


def start_hosted(executor: FleetExecutor, run: str) -> Handle:
    """Start the run's supervisor on a platform that hosts one, unless it runs there already; return its handle."""
    found = [h for h in executor.find(run) if h.slot == SUPERVISOR]
    if found and not executor.poll(found)[0].state.ended:
        return found[0]
    return executor.start_supervisor(*supervisor_spec(executor.name, run, _next_attempt(found)))


def _next_attempt(found: Iterable[Handle], after: int = 0) -> int:
    """Return a number that no launched supervisor has, not even a supervisor of a failed handover."""
    return 1 + max([after, *(h.attempt for h in found if h.slot == SUPERVISOR)])


def supervisor_spec(platform: str, run: str, attempt: int) -> tuple[ReplicaSpec, list[ReplicaSpec]]:
    """Return the supervisor's spec, with its replicas' variables and secrets, and a spec of each kind of replica."""
    here = [p for p in places_of(read_control(open_signed(run)).places) if p.executor == platform]
    replicas = [
        ReplicaSpec(run, "r00", env=p.env, gpu=gpu, timeout_s=p.timeout_s, secrets=p.secrets)
        for p in here
        for gpu in (p.gpu, ())
    ]
    env = {name: value for place in here for name, value in place.env.items()}
    secrets = tuple(dict.fromkeys(name for place in here for name in place.secrets))
    return ReplicaSpec(run, SUPERVISOR, attempt, ENTRYPOINT, (run,), env=env, secrets=secrets), replicas


def start_next(platform: str, options: Mapping[str, Any], raw: Mapping[str, Any]) -> bool:
    """Start the next supervisor, from the container whose time limit is near; return whether it was started."""
    spec = ReplicaSpec.from_dict(raw)
    executor = make_executor(Place(platform, options=options))
    attempt = 0
    for _ in range(TRIES):
        try:
            attempt = attempt or _next_attempt(executor.find(spec.run), spec.attempt)
            if executor.start_supervisor(*supervisor_spec(platform, spec.run, attempt)).native:
                return True
        except (ExecutorError, RendezvousError) as error:
            print(f"the next supervisor could not be started: {error}; trying again", flush=True)
        time.sleep(AGAIN_S)
    return False


def main(argv: list[str]) -> int:
    """Run a supervisor's job; at its time limit, start the next supervisor.

    The platform restarts the job after any exit code but 0.  So return 0, unless the supervisor ended without a last
    heartbeat "left", or could not start the next supervisor.
    """
    spec, platform, options = argv
    code = container.main([spec, platform])
    if code == exitcodes.RESUME:
        return 0 if start_next(platform, json.loads(options), json.loads(spec)) else code
    return code if is_cut_off(json.loads(spec)["run"], code) else 0


def is_cut_off(run: str, code: int) -> bool:
    """Whether the supervisor ended without writing its last heartbeat ("left").

    True if the store does not answer; False if it refuses this platform's keys, since a repetition changes nothing."""
    if code in (exitcodes.DONE, exitcodes.USER_ERROR, LOST_LEASE):
        return False
    try:
        return supervisor_of(open_signed(run)) is not None
    except RendezvousError as error:
        return not isinstance(error, StoreRefused)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A process that is a run's supervisor and nothing else: `diloco train --detach` starts it, on any machine.

    python -m executors.supervision.supervisor RUN_URL ──▶ main ──▶ the run, its places ──▶ Supervisor.supervise

Not promised: that it ends with its replicas; they continue if it is killed.
"""

import argparse
import os

from diloco.process.output import print_plainly
from diloco.run.record import read_run
from executors.platforms.base import REPLICA, ExecutorError
from executors.platforms.places import build_executor
from executors.supervision.lease import Supervised
from executors.supervision.notices import VARIABLE as ALERT
from executors.supervision.slots.slot_state import LOST_LEASE
from executors.supervision.supervisor import Outcome, Supervisor, end_code
from rendezvous.agreement.membership import read_control
from rendezvous.clock import SystemClock
from rendezvous.errors import RendezvousError


def main(argv: list[str] | None = None) -> int:
    """Run the supervisor of a detached run; its replicas continue if it is killed."""
    program = "python -m executors.supervision.supervisor"
    parser = argparse.ArgumentParser(prog=program, description="Keep a run's replicas alive.")
    parser.add_argument("url", help="the run")
    parser.add_argument("--entrypoint", default=REPLICA, metavar="MODULE:FUNCTION", help="what each replica runs")
    args = parser.parse_args(argv)
    print_plainly()
    try:
        outcome = supervise_run(args.url, args.entrypoint)
    except Supervised as error:
        outcome = Outcome(LOST_LEASE, str(error))
    except (RendezvousError, ExecutorError) as error:
        outcome = Outcome(end_code(error), str(error))
    print(outcome.text, flush=True)
    return outcome.code


def supervise_run(url: str, entrypoint: str) -> Outcome:
    run = read_run(url)
    wanted = read_control(run.store)
    executor = build_executor(wanted.places, wanted.former)
    try:
        alert = os.environ.get(ALERT, "")
        return Supervisor(run, executor, SystemClock(), entrypoint=entrypoint, alert=alert).supervise()
    finally:
        executor.close()

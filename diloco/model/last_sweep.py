"""The last deletion of a run's old blobs, by its supervisor, which has the credentials and ends after all replicas.

    replicas sweep when they close a step and when they end ──▶ the one that writes θ_T sweeps last
                                                                └ killed before it did: no replica sweeps after it

Imports no torch.   Not promised: this sweep without a supervisor (a library run, or a killed supervisor).
"""

from collections.abc import Callable

from diloco.run.config import BUCKET
from diloco.run.founding import is_finished
from diloco.run.record import ModelRecord, Run
from diloco.run.sections import keep_bytes
from rendezvous import layout
from rendezvous.agreement.chain import first_open_step
from rendezvous.agreement.membership import read_control
from rendezvous.clock import Clock
from rendezvous.keeping.garbage import sweep_ended_run
from rendezvous.store import PatientStore

PATIENCE_S = 10.0  # limit for an answer of the store


def sweep_after_end(run: Run, clock: Clock, emit: Callable[..., None]) -> int:
    """Delete a finished run's blobs beyond fleet.keep. Return how many are deleted, now or earlier.

    Raises RendezvousError.
    """
    budget = keep_bytes(run.config.fleet.keep)
    store = PatientStore(run.store, clock, PATIENCE_S)
    manifest = store.get(layout.MODEL_MANIFEST)
    if budget is None or manifest is None or run.config.rendezvous != BUCKET:
        return 0
    rules = run.config.outer.rules
    elements = ModelRecord.decode(manifest).fragment_sizes(rules.fragments)
    wanted = read_control(store)
    steps = first_open_step(store, wanted.steps if is_finished(store, wanted) else 0)
    return sweep_ended_run(store, rules, emit, steps=steps, budget=budget, elements=elements)

"""`diloco gc RUN --keep SIZE`: delete the oldest blobs of a run, down to SIZE.

    the replicas' rules of deletion (rendezvous/keeping/garbage.py), SIZE, a store that only notes keys ──▶ blobs
    blobs, and the recorded rollouts of steps whose θ cannot be computed without them ──▶ Plan
    Plan ──▶ a control record with `keep`, which tells readers ──▶ DELETE, oldest first

Blobs that a replica may need to heal stay under any SIZE, and so do small records: commits, offers, manifests, logs.
After a kill in the middle, the same command continues. The control record is written first, so readers do not take
missing blobs for damage.

A generation's recorded rollouts are deleted with all records beside them, as replicas do it
(diloco/replica/rollouts.py). Their bytes do not count in SIZE.

Not promised: sizes of objects that no record names (a body whose writer died); only their number is known.
"""

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from diloco.run.combinations import staleness_of
from diloco.run.config import BUCKET, ConfigError
from diloco.run.record import Run
from diloco.run.sections import keep_bytes
from diloco.runlog.reached import refuse_broken_chain
from rendezvous import layout
from rendezvous.agreement.membership import read_control, write_control
from rendezvous.background import fetch_together, together_on
from rendezvous.clock import Clock
from rendezvous.errors import StoreFull
from rendezvous.keeping.budget import parts_of
from rendezvous.keeping.garbage import parse_blob_key, sweep_ended_run
from rendezvous.keeping.reach import Reach, newest_head, read_reach
from rendezvous.records.records import Commit, Mean, Snapshot, WireError, decode_or_none
from rendezvous.records.rollouts import read_record
from rendezvous.store import Body, Buffer, PatientStore, Store

PATIENCE_S = 20.0
AT_ONCE = 1000  # at most so many keys in a DELETE
KINDS = ("delta", "mean", "snapshot", "bundle")


@dataclass(frozen=True)
class Plan:
    """A plan of deletions.   keys: oldest blob first, then bundles of rollouts with the records beside them.

    freed: kind -> bytes.   unnamed: number of blobs without a record.   before, after: the steps whose θ can be
    computed.   head: the first open step.
    """

    keep: str
    keys: tuple[str, ...]
    freed: dict[str, int]
    unnamed: int
    before: Reach
    after: Reach
    head: int

    @property
    def lost(self) -> list[int]:
        """The steps whose θ cannot be computed after the deletion."""
        return [t for t in range(self.head + 1) if self.before.covers_step(t) and not self.after.covers_step(t)]


class _Sketch:
    """A store whose `delete` only notes keys; its readers see no object with a noted key."""

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self._store = store
        self.gone = dict[str, None]()  # in the order of deletion

    def get(self, key: str) -> bytes | None:
        return None if key in self.gone else self._store.get(key)

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        return key not in self.gone and self._store.get_into(key, out, start)

    def list(self, prefix: str) -> list[str]:
        return [key for key in self._store.list(prefix) if key not in self.gone]

    def delete(self, keys: Iterable[str]) -> None:
        self.gone |= dict.fromkeys(keys)

    def put(self, key: str, body: Body) -> None:
        raise AssertionError("a plan of deletions writes nothing to the store")

    def create(self, key: str, body: Buffer) -> None:
        raise AssertionError("a plan of deletions writes nothing to the store")


def plan_gc(run: Run, keep: str, clock: Clock) -> Plan:
    """Plan the deletions.   Raises ConfigError if nothing may be deleted, ChainBroken if a commit is lost."""
    from diloco.model.export import model_record  # loads torch

    keep = keep.strip()
    budget = _budget(run, keep)
    store = PatientStore(run.store, clock, PATIENCE_S)
    refuse_broken_chain(store)
    head = newest_head(store)
    if head == 0:
        raise ConfigError(f"{run.url} has taken no outer step yet: there is nothing to collect")
    _refuse_live(run, store, head)
    rules = run.config.outer.rules
    elements = model_record(run).fragment_sizes(rules.fragments)
    sketch = _Sketch(store)
    sweep_ended_run(
        sketch, rules, lambda event, **fields: None, steps=head, budget=budget, elements=elements, at_most=head + 1
    )
    there = [key for key in sketch.gone if _stands(store, key)]
    freed, unnamed = _weigh(store, there)
    before, after = read_reach(store), read_reach(sketch)
    bundles = _old_bundles(run, store, after.since, head) if after.since else {}
    freed["bundle"] = sum(bundles.values())
    return Plan(keep=keep, keys=(*there, *bundles), freed=freed, unnamed=unnamed, before=before, after=after, head=head)


def collect(run: Run, plan: Plan, clock: Clock) -> None:
    """Write `keep` to a control record, then delete the plan's blobs.   Replicas still obey fleet.keep.

    On a full disk, we delete the first blobs before the record, until there is room for the record."""
    store = PatientStore(run.store, clock, PATIENCE_S)
    room = 0
    while True:
        try:
            write_control(run.store, clock, keep=plan.keep)
            break
        except StoreFull:
            if room == len(plan.keys):
                raise
            store.delete(plan.keys[room : room + 1])
            room += 1
    for at in range(room, len(plan.keys), AT_ONCE):
        store.delete(plan.keys[at : at + AT_ONCE])


def _budget(run: Run, keep: str) -> int:
    if run.config.rendezvous != BUCKET:
        raise ConfigError(f'this run has rendezvous = "{run.config.rendezvous}": it leaves nothing in a bucket')
    try:
        budget = keep_bytes(keep)
    except ConfigError:
        budget = None
    if budget is None:
        raise ConfigError(
            f'--keep {keep} is not a size. Use a size such as "5 GB", or "window": what a replica may need, no more'
        )
    return budget


def _refuse_live(run: Run, store: Store, head: int) -> None:
    """Raise ConfigError for a running run with keep = "all", whose replicas rely on all blobs."""
    wanted = read_control(store)
    if keep_bytes(wanted.keep or run.config.fleet.keep) is None and not wanted.stop and head < wanted.steps:
        raise ConfigError(
            'this run is not over, and its replicas may need every object (fleet.keep = "all"). Next: `diloco stop '
            f"{shlex.quote(run.url)}`, this command, and `diloco resume`"
        )


def _stands(store: Store, key: str) -> bool:
    return store.get_into(key, memoryview(bytearray(1)), 0)


# ---------------------------------------------------------------------- recorded rollouts


def _old_bundles(run: Run, store: Store, since: int, head: int) -> dict[str, int]:
    """Return key -> size of all objects of the generations that were trained before outer step `since`.

    Each slot trains its generations in order, so we read generations up to the first that stays.
    """
    ahead, parent = staleness_of(run.config), run.record.parent.outer_steps
    found, done = dict[str, int](), set[str]()
    for prefix, keys in groupby(store.list(layout.ROLLOUTS), lambda key: key.rpartition("/")[0]):
        slot = prefix.rpartition("/")[0] + "/"
        if slot == layout.ROLLOUTS or slot in done:
            continue
        bodies = fetch_together(together_on(run.store), store.get, keys)
        there = {key: body for key, body in bodies.items() if body is not None}
        if any(_last_use(body, ahead, parent + head) >= parent + since for body in there.values()):
            done.add(slot)
        else:
            found |= {key: len(there[key]) for key in sorted(there)}
    return found


def _last_use(body: bytes, ahead: int, newest: int) -> int:
    """Return the last outer step that can train on a bundle; -1 for another object, or if its record is false."""
    try:
        record, _ = read_record(body)
    except WireError:
        return -1
    return record.step + (ahead if record.actor else 0) if record.step <= newest else -1


# ---------------------------------------------------------------------- sizes


def _weigh(store: Store, keys: Iterable[str]) -> tuple[dict[str, int], int]:
    """Return kind -> bytes, and how many keys no record names."""
    weight = _Weight(store)
    freed: dict[str, int] = dict.fromkeys(KINDS, 0)
    unnamed = 0
    for key in keys:
        found = parse_blob_key(key)
        assert found is not None, "collectors delete blobs alone"
        kind, step = found
        size = weight.of(kind, step).get(key)
        freed[kind] += size or 0
        unnamed += size is None
    return freed, unnamed


@dataclass
class _Weight:
    """Sizes of a step's blobs, from the records that name them."""

    store: Store
    _known: dict[tuple[str, int], dict[str, int]] = field(default_factory=dict[tuple[str, int], dict[str, int]])
    _commits: dict[int, Commit | None] = field(default_factory=dict[int, Commit | None])

    def of(self, kind: str, step: int) -> dict[str, int]:
        if (kind, step) not in self._known:
            self._known[kind, step] = dict(self._read(kind, step))
        return self._known[kind, step]

    def _read(self, kind: str, step: int) -> Iterator[tuple[str, int]]:
        commit = self._commit(step)
        if kind == "delta" and commit is not None:
            yield from ((offer.blob, offer.size) for offer in commit.offers)
        elif kind == "mean" and commit is not None:
            found = [decode_or_none(Mean, self.store.get(layout.mean_key(step, j))) for j in parts_of(commit)]
            yield from ((mean.blob, mean.size) for mean in found if mean is not None)
        elif kind == "snapshot":
            snapshot = decode_or_none(Snapshot, self.store.get(layout.snapshot_key(step)))
            if snapshot is not None:
                yield snapshot.blob, snapshot.size

    def _commit(self, step: int) -> Commit | None:
        if step not in self._commits:
            self._commits[step] = decode_or_none(Commit, self.store.get(layout.commit_key(step)))
        return self._commits[step]


# ---------------------------------------------------------------------- words


def plan_lines(url: str, plan: Plan, best: int | None = None) -> list[str]:
    """Return the plan as text.   best: the step with the best evaluation, if there is one."""
    if not plan.keys:
        return [f"nothing to delete: all blobs fit into {plan.keep}, or a replica may need them"]
    parts = [f"{size / 1e6:,.1f} MB of {kind}s" for kind, size in plan.freed.items() if size]
    if plan.unnamed:
        parts.append(f"{plan.unnamed} objects that no record names, of unknown size")
    lines = [
        f"{len(plan.keys)} objects to delete: {', '.join(parts)}",
        f"θ that can be computed now {plan.before.in_words()}; afterwards it {plan.after.in_words()}",
    ]
    if late := sum(key.endswith(".reward") for key in plan.keys):
        lines.append(
            f"late rewards that would be deleted with these rollouts: {late}. Save them first: "
            f"diloco traces {shlex.quote(url)} --to FILE"
        )
    if best is not None and best in plan.lost:
        lines.append(
            f"the best evaluated step, {best}, would be lost. Save it first: "
            f"diloco export {shlex.quote(url)} --best --to DIR"
        )
    return lines

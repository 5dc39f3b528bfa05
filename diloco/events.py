"""The kinds of event in a run's logs: one table, used by every view and reader.

    level      replica's stderr   status: "!"   status, watch: lines   page          log
    WARNING    yes                yes           yes                    yes, marked   yes
    LOSS                                        yes                    yes, marked   yes
    NEWS                                        yes                    yes           yes
    DETAIL                                                             yes           yes
    DATA                                                                             yes

    {"event": "fenced", "slot": "r01"} ──▶ KINDS["fenced"].text: "A newer session holds its slot. …"

An alert also needs a detector in diloco/views/troubles.py and a section in docs/troubles.md.  A single `status`
shows NEWS only as part of a trouble; a `status` that follows the run prints it.

`Journal.emit` refuses a kind that is not here.  A reader ignores a kind of a newer release.

Not promised: that an event is true (diloco/process/journal.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WARNING, LOSS, NEWS, DETAIL, DATA = range(5)


@dataclass(frozen=True)
class EventKind:
    """One kind of event.   text: its meaning, for a new reader.   advice: the next thing to do, in half a line."""

    level: int
    text: str
    advice: str = ""


KINDS: Mapping[str, EventKind] = {
    # ---------------------------------------------------------------- a fault; the run continues
    "warning": EventKind(WARNING, "Look at this warning; its text has the reason."),
    "forged": EventKind(
        WARNING, "A record without this run's seal was ignored: another program can write to the bucket.",
        "change the bucket's credentials; diloco verify checks the run",
    ),
    "poisoned": EventKind(
        WARNING, "A pseudogradient held NaN, infinity or bytes that are not a valid encoding. It does not count.",
        "look at that replica's loss (l); diloco explain has the step",
    ),
    "bad_offer": EventKind(WARNING, "An offer's record is invalid. It was ignored.", "diloco explain has all offers"),
    "bad_blob": EventKind(
        WARNING, "An upload had another digest than its record names. It was not used; replicas agree on that.",
        "it is read again; diloco verify says whether it stays bad",
    ),
    "bad_snapshot": EventKind(
        WARNING, "A snapshot could not be read back as it was written. An older one and the stored means are used.",
        "an older snapshot is used; diloco verify says more",
    ),
    "base_differs": EventKind(
        WARNING, "Two replicas began a step from different weights. The weights replayed from the bucket are valid.",
        "the work from wrong weights does not count; diloco verify says more",
    ),
    "replay_differs": EventKind(
        WARNING, "Weights replayed from the bucket differ from those that a commit names. Run `diloco verify`.",
        "diloco verify says which step differs",
    ),
    "repaired": EventKind(WARNING, "A stored object was damaged and was written again from other copies."),
    "store_trouble": EventKind(
        WARNING, "The store refused a request or did not answer. The request is retried; nothing is lost.",
        "replicas ask again; diloco doctor URL says what the store can do",
    ),
    "disk_full": EventKind(
        WARNING, "A disk or a quota is full. Writers wait until there is room; nothing that was committed is lost.",
        "free some space; all writers wait for it",
    ),
    "boxes_failed": EventKind(WARNING, "A sandbox provider gave no box; see its error.", "check its quota and image"),
    "image_failed": EventKind(
        WARNING, "An image cannot be built, so rollouts of its Harbor task have no reward.", "correct its Dockerfile"
    ),
    "nothing_learned": EventKind(
        WARNING, "All gradients of the round were zero, for example because all rewards of each group are equal.",
        "is the task too hard or too easy? Key o shows rollouts with their rewards",
    ),
    "reward_failed": EventKind(
        WARNING, "Your reward function failed. It is retried; then the completion has no reward.",
        "diloco check CONFIG tries the reward here",
    ),
    "hint_failed": EventKind(
        WARNING, "The hint for a failed turn could not be made. The turn is trained without a hint.",
        "key o shows rollouts; the replica trains on the batch without the hint",
    ),
    "process_failed": EventKind(
        WARNING, "The process reward gave no scores for a batch. Only the batch's rewards train the model.",
        "the batch is trained with its rewards alone; diloco check CONFIG tries the function",
    ),
    "actor_given_up": EventKind(
        WARNING, "An actor failed too often and is not started again. Replicas make its rollouts themselves.",
        "diloco logs RUN a00 has its last lines; diloco resume tries again",
    ),
    "rollouts_refused": EventKind(WARNING, "Recorded rollouts did not fit; others were made.", "diloco verify --inner"),
    "rollouts_doubted": EventKind(WARNING, "An actor's rollouts failed the check; others were made.", "stop it"),
    "rollouts_lost": EventKind(WARNING, "Rollouts could not be kept or read. Training continued.", "look at the store"),
    # ---------------------------------------------------------------- a session, a launch or a request is lost
    "killed": EventKind(
        LOSS, "A signal ended the process without notice. At most its work since its last upload is lost.",
        "its supervisor starts it again",
    ),
    "lost": EventKind(
        LOSS, "The platform reports that the launch ended. The supervisor starts the slot again.",
        "its supervisor starts it again; l shows its last lines",
    ),
    "crashed": EventKind(
        LOSS, "The replica's program ended with an error. The supervisor starts its slot again.",
        "l shows the traceback",
    ),
    "hung": EventKind(
        LOSS, "The replica's own watchdog saw no progress and ended it.",
        "its supervisor starts it again; l shows where it hung",
    ),
    "diverged": EventKind(
        LOSS, "The replica's weights, or its base, had another digest than the run's. The next session heals.",
        "the next session heals; if it happens again, try another machine; your own code may write to frozen weights",
    ),
    "outdated": EventKind(LOSS, "An object that a session needed was deleted (fleet.keep). The next session heals."),
    "bad_delta": EventKind(
        LOSS, "The replica's pseudogradient held NaN or infinity, or was far too long. The slot's next session heals.",
        "if it happens again, set a smaller inner.lr, or use float32 weights",
    ),
    "gave_up": EventKind(
        LOSS, "No progress for too long: the replica ended (exit code 75). If you start it again, it continues.",
        "diloco resume continues the run",
    ),
    "gave_up_on": EventKind(
        LOSS, "A slot failed again and again by its own fault. The run ends rather than billing a loop of crashes.",
        "it failed too often: read its log (l), fix it, then diloco resume",
    ),
    "refused": EventKind(
        LOSS, "The platform refused a launch, or a store a request. You must fix this; see the text.",
        "look at the platform's credentials and quota",
    ),
    "sync_failed": EventKind(LOSS, "A round could not be finished. The replica continues with the next round."),
    "platform_silent": EventKind(
        LOSS, "The platform gives no answer. Running replicas continue; none is started or replaced meanwhile.",
        "replicas continue; none is replaced until the platform answers",
    ),
    # ---------------------------------------------------------------- the fleet changes
    "started": EventKind(NEWS, "A supervisor began to look after the run."),
    "stopped": EventKind(NEWS, "The supervisor ended."),
    "published": EventKind(NEWS, "The start model and its manifest are in the bucket: replicas can begin."),
    "launched": EventKind(NEWS, "The supervisor asked the platform for a replica in this slot."),
    "found": EventKind(NEWS, "A launch whose answer had been lost was found again on its platform."),
    "joined": EventKind(NEWS, "The session has the run's weights and begins to train, or to sample as an actor."),
    "adopted": EventKind(NEWS, "An earlier session of this slot has offered work for the step; that work counts."),
    "left": EventKind(NEWS, "The replica left with notice: it uploaded its work first.", "its work is offered"),
    "fenced": EventKind(
        NEWS, "A newer session holds its slot. Later uploads of this session are ignored.", "nothing to do"
    ),
    "fenced_off": EventKind(NEWS, "A supervisor fenced off a launch that does not end: its work does not count."),
    "draining": EventKind(NEWS, "A replica was asked to offer its work and leave.", "diloco scale brings it back"),
    "replacing": EventKind(NEWS, "The supervisor replaces a replica that gives no sign of life."),
    "platform_answers": EventKind(NEWS, "The platform answers again."),
    "queued": EventKind(NEWS, "A launch still waits for a machine. The platform's reason is in `why`."),
    # ---------------------------------------------------------------- for readers who look closely
    "claimed": EventKind(DETAIL, "A process took the slot."),
    "launching": EventKind(DETAIL, "The supervisor is about to ask the platform for replicas."),
    "pending": EventKind(DETAIL, "The launch waits for a machine."),
    "running": EventKind(DETAIL, "The launch has its machine."),
    "ended": EventKind(DETAIL, "A launch ended as it was asked to."),
    "looks_again": EventKind(DETAIL, "Blobs were deleted while a session read them. The session reads newer ones."),
    "healed": EventKind(
        DETAIL, "A session read the newest snapshot and the means after it: it has the run's weights, bit for bit."
    ),
    "caught_up": EventKind(DETAIL, "The replica applied outer steps that were committed without it."),
    "offer_lost": EventKind(DETAIL, "An earlier session's offer counts for the step; this session's does not."),
    "inherited": EventKind(DETAIL, "The session took over the codec residual and moments of the session before it."),
    "moments_left": EventKind(DETAIL, "The optimizer's moments were left for the slot's next session."),
    "moments_taken": EventKind(DETAIL, "The session took over the optimizer's moments of the session before it."),
    "bad_moments": EventKind(DETAIL, "The moments of the session before do not fit. The optimizer starts fresh."),
    "bad_residual": EventKind(DETAIL, "The last session's leave file is damaged: codec and moments start at 0."),
    "residual_dropped": EventKind(DETAIL, "No time was left to upload the codec's residual. The residual is lost."),
    "baggage_dropped": EventKind(DETAIL, "No time was left to upload the moments. The next session has none."),
    "no_leave_record": EventKind(DETAIL, "The leave record was not written; others wait until its heartbeat is old."),
    "snapshot": EventKind(DETAIL, "Weights and outer momentum were written. A session that joins reads them."),
    "snapshot_copied": EventKind(DETAIL, "The rest of an unfinished snapshot was copied: an outer step was due."),
    "not_written": EventKind(DETAIL, "A snapshot or mean could not be written. Another replica can write it."),
    "collected": EventKind(DETAIL, "Old pseudogradients, means and snapshots were deleted (fleet.keep)."),
    "boxes_swept": EventKind(DETAIL, "The supervisor stopped the run's boxes, and none is left."),
    "garbage_stays": EventKind(DETAIL, "Old objects could not be deleted. They only take space."),
    "codec": EventKind(DETAIL, "The codec of this run's pseudogradients."),
    "weights": EventKind(DETAIL, "The step's weights were written in bf16, for engines that generate rollouts."),
    "weights_left_out": EventKind(DETAIL, "The store is slower than a round: a step's bf16 weights were not written."),
    "weights_refused": EventKind(DETAIL, "A reader of the bf16 weights ignored weights: damaged, or of another θ."),
    "trouble": EventKind(DETAIL, "An alert was sent: a trouble began."),
    "trouble_over": EventKind(DETAIL, "An alert was sent: a trouble is over."),
    "alerted": EventKind(DETAIL, "The webhook accepted an alert."),
    "alert_failed": EventKind(DETAIL, "An alert did not reach the webhook."),
    # ---------------------------------------------------------------- numbers for curves and bills
    "rollouts_found": EventKind(DATA, "A replica trained on rollouts that were recorded before."),
    "sampled": EventKind(DATA, "An actor sampled rollouts for a slot."),
    "step": EventKind(DATA, "A replica's numbers of an outer step."),
    "evaluated": EventKind(DATA, "A replica's share of an evaluation on held-out prompts."),
    "data": EventKind(DATA, "The part of the prompts that a session reads, and its start."),
    "deletion_flagged": EventKind(DATA, "Feature Deletion: what the monitor found; the hidden tests decide."),
    "boxes_used": EventKind(DATA, "The boxes that a batch of rollouts used; reported when the last box had ended."),
    "lease": EventKind(DATA, "The time until which replicas may run without a supervisor, and the costs so far."),
}  # fmt: skip


def kinds_of(*levels: int) -> frozenset[str]:
    return frozenset(kind for kind, about in KINDS.items() if about.level in levels)


WARNINGS = kinds_of(WARNING)
SHOWN = kinds_of(WARNING, LOSS, NEWS)  # status and watch print these as they happen
MARKED = kinds_of(WARNING, LOSS)
ON_PAGE = kinds_of(WARNING, LOSS, NEWS, DETAIL)

# The last event of a session that ended; and the events of a supervisor for a launch that ended.
SESSION_ENDS = ("left", "fenced", "gave_up", "diverged", "outdated", "bad_delta", "refused", "crashed", "hung")
LAUNCH_BEGINS = ("launched", "found")
LAUNCH_ENDS = ("killed", "lost", "ended")


def advice_on(event: Mapping[str, Any]) -> str:
    """Return the advice on an event; "" without one, or for a kind of a newer release."""
    known = KINDS.get(event["event"])
    return known.advice if known is not None else ""


# fields of a "step" event that we set: an inner loop's numbers must have other names
TAKEN = frozenset(
    {
        "at", "event", "slot", "generation", "step", "h", "listed", "theta", "bytes_up", "bytes_down", "delta_norm",
        "empty", "moved", "participants", "rho", "effective_step", "cos_pair", "cross_term", "mean_norm", "outer_lr",
        "inner_s", "offer_s", "wait_s", "mean_s", "device",
    }
)  # fmt: skip


# -------------------------------------------------------------------- one event in words

SENTENCE = ("text", "error", "cause", "trouble", "reason")  # the first of these fields that is set is the event's text
NOT_TOLD = frozenset(
    {
        "at", "event", "slot", "who", "generation", "tail", "handle", "launched_at", "useful", "own_fault", "by_reward",
        "pid", "seal",
    }
)  # fmt: skip


def event_text(event: Mapping[str, Any]) -> str:
    """Return the event's text, or its fields if it has none: "step 3, snapshot 0"."""
    if said := next((event[name] for name in SENTENCE if event.get(name)), None):
        return " ".join(str(said).split())
    rest = {k: v for k, v in event.items() if k not in NOT_TOLD and v is not None and not isinstance(v, dict | list)}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in rest.items())

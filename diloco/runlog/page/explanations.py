"""The meaning of each event of a log, for somebody who meets it first.  A page shows events of these kinds alone.

    {"event": "fenced", "slot": "r01"} ──▶ "A newer session holds its slot; this one's later uploads are ignored."

Not promised: an explanation for an event of a newer release; it is in the log (`diloco logs`) and not on the page.
"""

from collections.abc import Mapping
from typing import Any

LOUD = frozenset(
    {
        "bad_blob", "bad_snapshot", "base_differs", "crashed", "disk_full", "diverged", "forged", "gave_up",
        "gave_up_on", "hint_failed", "hung", "killed", "lost", "nothing_learned", "platform_silent",
        "process_failed", "refused",
        "repaired", "replay_differs", "reward_failed", "store_trouble", "sync_failed", "warning",
    }
)  # fmt: skip
EXPLANATIONS = {
    "adopted": "An earlier session of this slot had uploaded for the step already; its work counts.",
    "bad_blob": "An upload had another digest than its record names. It was not used; replicas agree on that.",
    "bad_snapshot": "A snapshot could not be read back as it was written. An older one and the stored means are used.",
    "base_differs": "A pseudogradient was computed from other weights than the run's. It was not used.",
    "crashed": "The replica's program ended with an error. The supervisor starts its slot again.",
    "disk_full": "A disk or a quota is full. Writers wait until there is room; nothing that was committed is lost.",
    "diverged": "The replica's weights had another digest than the run's. It ended, and its next session heals.",
    "draining": "A replica was asked to finish its round and leave.",
    "fenced": "A newer session holds its slot. Whatever this one uploaded afterwards is ignored.",
    "fenced_off": "The supervisor closed a slot to a launch that does not end, so that it counts for nothing.",
    "forged": "A record without this run's seal was passed over: somebody else can write to the bucket.",
    "found": "A launch whose answer had been lost was found again on its platform.",
    "gave_up": "No progress for too long: the replica ended (exit code 75). Starting it again goes on.",
    "gave_up_on": "A slot failed again and again by its own fault. The run ends rather than billing a loop of crashes.",
    "healed": "A session read the newest snapshot and the means after it: it has the run's weights, bit for bit.",
    "hint_failed": "The hint for a failed turn could not be made. That turn is trained without one.",
    "hung": "The replica's own watchdog saw no progress and ended it.",
    "joined": "The session has the run's weights and begins to train.",
    "killed": "The process was ended by a signal without notice. At most its work since its last upload is lost.",
    "launched": "The supervisor asked the platform for a replica in this slot.",
    "left": "The replica left with notice: it uploaded what it had first.",
    "lost": "The platform says that the launch ended. The supervisor starts the slot again.",
    "nothing_learned": "All gradients of the round were zero, for example because all rewards of each group are equal.",
    "platform_answers": "The platform answers again.",
    "platform_silent": "The platform gives no answer. Replicas that run go on; none is started or replaced meanwhile.",
    "process_failed": "The process reward gave no scores for a batch. The batch is learned from by its rewards alone.",
    "published": "The start model and its manifest lie in the bucket: replicas can begin.",
    "refused": "The platform refused a launch, or a store a request. A person has to mend it; see the text.",
    "repaired": "A stored object was damaged and was written again from other copies.",
    "replacing": "The supervisor replaces a replica that gives no sign of life.",
    "replay_differs": "Weights computed from the log differ from those of a snapshot. Run `diloco verify`.",
    "reward_failed": "Your reward function failed. It is asked again; then the completion has no reward.",
    "snapshot": "The weights and the outer momentum were written down: who joins heals from here.",
    "started": "A supervisor began to look after the run.",
    "stopped": "The supervisor ended.",
    "store_trouble": "The store refused a request or did not answer. It is asked again; nothing is lost.",
    "sync_failed": "A round could not be finished. The replica goes on with the next one.",
    "weights": "The step's weights were written in bf16, for engines that generate rollouts.",
    "weights_left_out": "The store is slower than a round: the step's bf16 weights were not written; later ones are.",
    "warning": "Something wants a person's attention; the text says what.",
}
ABOUT = frozenset(
    {
        "at", "event", "slot", "who", "generation", "tail", "handle", "launched_at", "useful", "own_fault", "by_reward",
        "pid", "seal",
    }
)  # fmt: skip
SAID = ("text", "error", "cause", "trouble", "reason")  # the first of these that an event has is its sentence


def event_text(event: Mapping[str, Any]) -> str:
    """The event's own sentence, else its fields: "step 3, snapshot 0"."""
    if said := next((event[name] for name in SAID if event.get(name)), None):
        return " ".join(str(said).split())
    rest = {k: v for k, v in event.items() if k not in ABOUT and v is not None and not isinstance(v, dict | list)}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in rest.items())

"""One replica's work, split over processes that Monarch (torchmonarch 0.7) watches over.

    the outer loop ──θ_t──▶ TrainerActor ── prompts, random state ──▶ GeneratorActor          completions
                    ◀──θ──      │       ── rows with a hint ───────▶ SDPOTeacherActor        logits
                                └───────── states ─────────────────▶ TeacherReplayActor × K  teachers' actions

    ReplicaActor   owns them; `__supervise__` starts a killed one again, and its caller asks the new one the same thing

    rounds.py    a round of H inner steps as a function: (t, θ_t, what is carried) -> θ        no monarch in it
    wire.py      the requests, and the functions that answer them                              no monarch in it
    actors.py    the four actors: a process around each of those
    replica.py   ReplicaActor, and what callers hold: Member, Replica

Every answer is a function of its question, randomness included, so a kill costs time and no bits: the outer steps of a
run are those of a run without it.  examples/monarch_replica.py is a whole replica; docs/backends.md says how to run it.

Not promised: anything between replicas, which meet in the bucket as ever; several hosts; a process that hangs.
"""

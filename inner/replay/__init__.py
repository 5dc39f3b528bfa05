"""Frozen traces, asked again: the actions of stronger models in the student's states.

    rollouts ──▶ TraceState ──▶ replay_trace ──▶ TeacherAction ──▶ extract_dpo_pairs ──▶ DPOPair ──▶ DJNormalizer
     states.py                   ask.py           on disk as it      pairs.py                         normalize.py
     traces.py (other people's)  under a hard     arrives: a killed
                                 cost ceiling     replay resumes

    actions.py    an action as one string, and when two actions are the same
    teachers.py   one teacher: its price, its request, how its response reads
    exchange.py   one HTTP exchange within a deadline and a byte limit, and the meaning of its response
    ledger.py     the money and the answers, one line each
    commands.py   which part of a turn is the command that two actions are compared by
    untrusted.py  JSON and text from outside this project, read within bounds

Importing this package imports neither httpx nor torch.

Not promised: that the teachers are right. A pair says that enough of them agreed with each other and not with the
student.
"""

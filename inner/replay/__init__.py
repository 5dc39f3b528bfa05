"""Frozen traces, asked again: what would stronger models have done in the states where the student stood?

    rollouts ──▶ TraceState ──▶ replay_trace ──▶ TeacherAction ──▶ extract_dpo_pairs ──▶ DPOPair ──▶ DJNormalizer
     states.py                   ask.py           on disk as it      pairs.py                         normalize.py
     traces.py (other people's)  under a hard     arrives: a killed
                                 cost ceiling     replay resumes

    actions.py    an action as one string, and when two actions are the same
    teachers.py   one teacher: its price, its request, how its response reads
    ledger.py     the money and the answers, one line each

Importing this package imports neither httpx nor torch.

Not promised: that the teachers are right. A pair says that enough of them agreed with each other and not with the
student.
"""

"""Ask stronger models for their actions in recorded states of the student, and make preference pairs from them.

    rollouts ──▶ TraceState ──▶ replay_trace ──▶ TeacherAction ──▶ extract_dpo_pairs ──▶ DPOPair ──▶ DJNormalizer
     states.py                   ask.py           on disk as it      pairs.py                         normalize.py
     traces.py (other projects)  under a hard     arrives: a killed
                                 cost ceiling     replay resumes

    actions.py    an action as one string; whether two actions are the same
    teachers.py   one teacher: its price, its request, how its response is read
    exchange.py   one HTTP exchange within a deadline and a byte limit, and the meaning of its response
    ledger.py     payments and answers, one per line
    commands.py   finds the command in a turn; turns are compared by their commands
    untrusted.py  JSON and text from outside this project, read within bounds

Importing this package imports neither httpx nor torch.

Not promised: that the teachers are right. A pair means that enough teachers agreed on another action than the student.
"""

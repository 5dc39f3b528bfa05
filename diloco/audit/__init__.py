"""Looking back at a run: is it what it says, what happened, who did it.   torch is needed; nothing is written.

verify.py   θ again, by digests      explain.py   one outer step in words      (facts: step_facts.py)
bisect.py   since which step?        blame.py     whose pseudogradients?       (a user's command: judge.py)
"""

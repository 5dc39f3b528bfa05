"""bf16 weights of every outer step, for engines that generate rollouts and train nothing.

    committer ── patch.py, writer.py ──▶ weights/{t} ──▶ follower.py ── tensors ──▶ an engine

No replica reads what is here, and a run without it is the same run.
"""

"""bf16 weights of every outer step, for engines that generate rollouts and train nothing.

    committer ── patch.py, writer.py ──▶ weights/{t} ──▶ follower.py ── tensors ──▶ an engine

No replica reads these weights, and a run without them is the same run.
"""

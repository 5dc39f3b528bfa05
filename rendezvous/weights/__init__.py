"""bf16 weights of every outer step, for inference engines that generate rollouts.

    closer ── patch.py, writer.py ──▶ weights/{t} ──▶ follower.py ── tensors ──▶ an engine

No replica reads these weights, so they do not change the run.
"""

"""Loss kernels: pure functions of logits or log-probs. One file per family; the paper's letters stay the paper's
letters."""

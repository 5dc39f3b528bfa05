"""Loss kernels: pure functions of logits or log-probs. Each file has one family, with its paper's variable names."""

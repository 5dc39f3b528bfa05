"""Check by log-probs or TOPLOC's proofs whether the policy wrote these rollouts."""

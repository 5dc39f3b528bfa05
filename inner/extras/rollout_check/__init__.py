"""Whether the policy wrote these rollouts: by its log-probs, or by TOPLOC's proofs."""

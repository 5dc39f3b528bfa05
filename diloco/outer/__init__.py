"""The outer loop: flat θ, its change Δ and the outer step; managers/ connect it to torchft."""

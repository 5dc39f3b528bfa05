"""Models of a run: the start model in and out, θ of a step exported, forked from, given back."""

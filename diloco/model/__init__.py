"""Models of a run: publish and fetch the start model; export θ, fork from it, give it back."""

"""θ and the outer state, written down now and then, and read back."""

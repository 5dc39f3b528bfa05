"""torchft's fragments with θ in place, and classes in their place where torchft has no wheel."""

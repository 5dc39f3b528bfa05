"""The mean of a commit, computed from the bodies that its offers name."""

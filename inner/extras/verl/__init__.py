"""The channels as an advantage estimator of verl."""

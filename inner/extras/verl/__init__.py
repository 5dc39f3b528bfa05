"""SDPO as an advantage estimator of verl."""

"""Objects that torchft takes for a Manager: through the bucket, with `make_diloco` or bare, or through a lighthouse."""

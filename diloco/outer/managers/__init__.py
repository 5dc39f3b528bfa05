"""Managers for torchft: over a bucket (with `make_diloco`, or bare), or over a lighthouse."""

"""Kernels that encode or add a whole piece in one pass over memory: in C for the CPU, in Triton for CUDA."""

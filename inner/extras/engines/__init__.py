"""Engines that sample for an actor instead of TRL: a server, llama.cpp, MLX."""

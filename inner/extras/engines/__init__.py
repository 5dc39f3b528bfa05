"""What samples for an actor instead of TRL: a server, llama.cpp."""

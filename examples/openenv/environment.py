"""The client of server.py: the server's own tools, as TRL's environment.

OPENENV_URL is the server's address. To describe the tools yourself, write a class on OpenEnv with a
method per tool (inner/extras/openenv/client.py shows one).
"""

from inner.extras.openenv.client import openenv_environment

Arithmetic = openenv_environment()

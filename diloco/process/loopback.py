"""Keeps requests to this machine's own servers away from a proxy.

    HTTP_PROXY=http://proxy:3128  NO_PROXY=.corp   ──▶   NO_PROXY=no_proxy=.corp,localhost,127.0.0.1,::1

httpx, requests, urllib and obstore send a request for 127.0.0.1 to the proxy, which cannot reach this machine: the
endpoint of agents, an engine beside the actor and a local bucket would be lost.  Child processes inherit the variables.

Not promised: to keep requests away from a proxy in the settings of macOS or Windows, or requests of a script that you
start without `diloco`.
"""

from collections.abc import MutableMapping

HERE = ("localhost", "127.0.0.1", "::1")


def pass_the_proxy(environment: MutableMapping[str, str]) -> None:
    """Add the names of this machine to NO_PROXY and no_proxy: some clients read the first, some the second."""
    upper, lower = environment.get("NO_PROXY", ""), environment.get("no_proxy", "")
    for name, listed in (("NO_PROXY", upper or lower), ("no_proxy", lower or upper)):
        words = [word.strip() for word in listed.split(",") if word.strip()]
        environment[name] = "*" if "*" in words else ",".join([*words, *(host for host in HERE if host not in words)])

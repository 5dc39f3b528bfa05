"""Heartbeats in a loop, for replicas of the tests: a Session has a loop of its own (diloco/process/session.py)."""

from collections.abc import Callable

from rendezvous.agreement.membership import Membership


def tick_until(members: Membership, stopped: Callable[[], bool]) -> None:
    while not stopped():
        members.tick()
        members.clock.sleep(members.timing.beat)

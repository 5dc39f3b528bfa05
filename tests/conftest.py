"""For all tests: what was imported to collect them is never searched for garbage.

Collecting imports torch, transformers, TRL and Modal: a million objects that live as long as the process.  Python's
collector would walk them again and again; without that, the tests take a tenth to a fifth less time.
"""

import gc

import pytest

gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()

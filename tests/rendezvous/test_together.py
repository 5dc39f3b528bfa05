"""The decision that requests go together: the builder of a replica makes it, never the engine.

in_turn    a folder, memory: a request costs no more than a copy
at_once    S3: a thread each
"""

import signal
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from diloco.model import export as history
from diloco.process import session
from diloco.run.config import ConfigError
from rendezvous.agreement.rules import Timing
from rendezvous.background import at_once, in_turn, together_on
from rendezvous.engine.allreduce import ObjectStoreAllReduce
from rendezvous.means.reduce import Reducer
from rendezvous.store import Store
from rendezvous.stores.cloud import store as cloud
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.signed import SignedStore
from tests.rendezvous.test_engine import pair, together
from tests.support.fakes import FaultyStore, ManualClock
from tests.support.fleet import Fleet


def far() -> Store:
    """A store that does not say that its requests are cheap, as a cloud's does not."""
    return FaultyStore(MemoryStore())


def test_the_engine_starts_no_thread() -> None:
    _, a, b = pair(ManualClock())

    def start(thread: threading.Thread) -> None:
        raise AssertionError(f"the engine starts {thread.name}")

    with patch.object(threading.Thread, "start", start):
        for _ in range(3):
            together(a, b)
    assert np.array_equal(a.state.theta, b.state.theta)


def test_requests_go_at_once_where_each_takes_long() -> None:
    assert together_on(far()) is at_once and together_on(SignedStore(far(), b"k" * 16, "run")) is at_once
    assert together_on(MemoryStore()) is in_turn and together_on(SignedStore(MemoryStore(), b"k" * 16, "r")) is in_turn


@pytest.mark.parametrize(("store", "way"), [(MemoryStore(), in_turn), (far(), at_once)])
def test_a_replica_and_a_rank_are_built_for_their_store(store: Store, way: object) -> None:
    replica = session.Session(store, "r00", Timing())
    replica.end()
    rank = ObjectStoreAllReduce("memory://unused", 0, 2, store=store)
    assert rank.step == 0
    reducers = [replica.rv.reducer, rank._caught_up_rendezvous().reducer]
    assert [reducer.bodies._together for reducer in reducers] == [way, way]


def test_an_export_reads_bodies_in_the_way_of_its_store(tmp_path: Any) -> None:
    fleet, built = Fleet(tmp_path), list[object]()

    def spied(*args: Any, **named: Any) -> Reducer:
        built.append(named["together"])
        return Reducer(*args, **named)

    with patch.object(history, "Reducer", spied), pytest.raises(ConfigError, match="no readable snapshot yet"):
        history.state_at(fleet.run, fleet.model, None)
    assert built == [in_turn]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt here, also where the tests run as a job in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_does_not_wait_for_requests_of_other_threads(ctrl_c: None) -> None:
    answered = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        at_once(lambda: signal.raise_signal(signal.SIGINT), lambda: [None, answered.wait()][0])
    answered.set()


def test_a_signal_just_before_the_main_thread_waits_is_heard(ctrl_c: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen once in sixty under load: the wait had no end, so the first Ctrl-C was heard with the bucket's answer."""
    monkeypatch.setattr(cloud, "TURN_S", 0.01)
    heard = threading.Event()

    def request() -> bool:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # it does not interrupt the main thread's wait
        return heard.wait(30)

    with pytest.raises(KeyboardInterrupt):
        cloud._heeding_signals(request)  # pyright: ignore[reportPrivateUsage]
    heard.set()

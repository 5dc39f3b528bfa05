"""Actors that sample nothing, for tests of what keeps them.  Without torch, so that they start at once."""

import os
import signal
import sys
import threading
import time

from diloco.process import exitcodes
from rendezvous import layout
from rendezvous.agreement.membership import read_control
from rendezvous.agreement.rules import Rules
from rendezvous.clock import SystemClock
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import Fenced
from rendezvous.stores.files import FileStore
from tests.executors.test_supervisor import TIMING
from tests.support.ticking import tick_until
from tests.support.workers import identity

CLOCK = SystemClock()


def toy_actor(argv: list[str]) -> int:
    url, slot = argv[0], argv[2]
    rv = Rendezvous(
        FileStore(url.removeprefix("file://")), CLOCK, slot, Rules(), TIMING, **identity(os.getpid())
    )  # fmt: skip
    rv.claim()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: rv.ask_to_leave())
    rv.members.status.enter_phase("sample", 0)
    threading.Thread(target=tick_until, args=(rv.members, ended.is_set), daemon=True).start()
    try:
        while not rv.is_leaving and rv.store.get(layout.commit_key(read_control(rv.store).steps - 1)) is None:
            rv.members.refuse_if_fenced()
            rv.members.status.inner += 1
            time.sleep(0.05)
    except Fenced:
        return exitcodes.FENCED
    ended.set()
    rv.members.write_leave_beat()
    return exitcodes.LEFT if rv.is_leaving else exitcodes.DONE


def broken_actor(argv: list[str]) -> int:
    print("ImportError: no module named spoons", file=sys.stderr)
    return exitcodes.USER_ERROR

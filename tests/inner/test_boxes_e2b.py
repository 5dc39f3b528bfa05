"""E2B's own SDK against a server of the tests. `make test-boxes` has the SDK; without it, one test runs."""

import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from inner.errors import InnerError
from inner.extras.boxes import e2b_boxes
from inner.extras.boxes.box import CUT, HALF_OUTPUT, BoxGone, BoxOwner, BoxRecipe, ProviderFailed, Ran
from inner.extras.boxes.starting import BoxStarter, open_provider
from tests.support.e2b_server import E2bServer
from tests.support.planted_boxes import VirtualClock, namespaces_work

OWNER = BoxOwner("my run", "0", 1, "g1/k2")
HERE = importlib.util.find_spec("e2b") is not None
sdk = pytest.mark.skipif(not HERE or not namespaces_work(), reason="needs e2b (make test-boxes) and unshare")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[E2bServer]:
    with E2bServer(tmp_path) as server:
        yield server
        server.shutdown()


def _starter(server: E2bServer) -> BoxStarter:
    clock = VirtualClock()
    return BoxStarter(open_provider("e2b", **server.options), clock=clock, sleep=clock.sleep, seed=0)


@pytest.mark.skipif(HERE, reason="e2b is installed")
def test_without_the_sdk_it_says_what_to_install() -> None:
    with pytest.raises(InnerError, match="pip install e2b"):
        open_provider("e2b", api_key="k")


@sdk
def test_the_five_verbs(server: E2bServer) -> None:
    starter = _starter(server)
    box = starter.start(OWNER, BoxRecipe(files={"/app/a.txt": b"one"}))
    assert box.exec("cat a.txt; echo two >&2; exit 3", user="someone", timeout_s=30) == Ran(3, "onetwo\n")
    assert server.users[-1] == "someone"
    assert box.exec("sleep 100", user="user", timeout_s=0.5).timed_out
    box.write("b/c.bin", b"\x00\xff")
    assert box.read("/app/b/c.bin") == b"\x00\xff"
    with pytest.raises(FileNotFoundError):
        box.read("absent")
    assert starter.sweep({"run": "other"}) == 0
    assert starter.sweep({"run": "my run"}) == 1 and server.boxes == {}


@sdk
def test_a_box_without_a_network_is_created_so(server: E2bServer) -> None:
    provider = open_provider("e2b", **server.options)
    provider.start(OWNER, BoxRecipe(), timeout_s=60)
    provider.start(BoxOwner("r", "0", 1, "2"), BoxRecipe(offline=True), timeout_s=60)
    assert server.online[1] is False and server.online[0] is not False


@sdk
def test_a_lost_reply_is_adopted_and_has_all_verbs(server: E2bServer) -> None:
    server.lose_replies = 1
    starter = _starter(server)
    box = starter.start(OWNER, BoxRecipe(files={"/app/a.txt": b"one"}))
    assert len(server.boxes) == 1 and starter.counts["adopted"] == 1
    assert box.exec("cat /app/a.txt", user="user", timeout_s=30).output == "one"
    starter.release(OWNER)
    assert server.boxes == {}


@sdk
def test_a_dead_box_is_gone(server: E2bServer) -> None:
    box = _starter(server).start(OWNER, BoxRecipe())
    server.dead = set(server.boxes)
    with pytest.raises(BoxGone):
        box.exec("true", user="user", timeout_s=5)
    with pytest.raises(BoxGone):
        box.write("a", b"")


@sdk
def test_a_new_box_that_dies_is_replaced_by_another_and_not_named_again(server: E2bServer) -> None:
    server.dead = {"id0"}
    box = _starter(server).start(OWNER, BoxRecipe(files={"/app/a.txt": b"one"}))
    assert box.read("a.txt") == b"one" and list(server.boxes) == ["id1"]


@sdk
def test_an_adopted_box_that_dies_is_not_named_again_either(server: E2bServer) -> None:
    server.lose_replies, server.dead = 1, {"id0"}
    starter = _starter(server)
    box = starter.start(OWNER, BoxRecipe(files={"/app/a.txt": b"one"}))
    assert starter.counts["adopted"] == 1
    assert box.read("a.txt") == b"one" and list(server.boxes) == ["id1"]


@sdk
def test_a_process_in_the_background_does_not_hold_the_call(server: E2bServer) -> None:
    box = _starter(server).start(OWNER, BoxRecipe())
    assert box.exec("sleep 1000 & echo started; exit 3", user="user", timeout_s=5) == Ran(3, "started\n")


@sdk
def test_a_command_without_an_answer_is_a_time_limit_and_no_death(
    server: E2bServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ignores TERM, so here the SDK's own limit ends the call."""
    box = _starter(server).start(OWNER, BoxRecipe())
    monkeypatch.setattr(e2b_boxes, "ANSWER_S", 0.5)
    monkeypatch.setattr(e2b_boxes, "KILL_AFTER_S", 0)
    hangs = "trap '' TERM; sleep 5; sleep 5"
    assert box.exec(hangs, user="user", timeout_s=1) == Ran(137, "")
    threading.Timer(0.5, lambda: server.dead.update(server.boxes)).start()
    with pytest.raises(BoxGone):
        box.exec(hangs, user="user", timeout_s=1)
    monkeypatch.undo()
    server.dead.clear()
    assert box.exec("echo alive", user="user", timeout_s=30) == Ran(0, "alive\n")


@sdk
@pytest.mark.parametrize("fault", ["busy", "html", "drop"])
def test_what_the_sdk_does_not_call_its_own_error_is_a_failed_start(server: E2bServer, fault: str) -> None:
    setattr(server, fault, 1)
    starter = _starter(server)
    box = starter.start(OWNER, BoxRecipe(files={"/app/a.txt": b"one"}))
    assert box.read("a.txt") == b"one" and starter.counts["failed"] == 1 and len(server.boxes) == 1
    server.drop = 1
    with pytest.raises(BoxGone):
        box.exec("true", user="user", timeout_s=5)


@sdk
def test_bytes_that_are_no_text_are_not_a_cut(server: E2bServer) -> None:
    """The SDK makes three bytes of each."""
    box = _starter(server).start(OWNER, BoxRecipe())
    ran = box.exec("head -c 3000 /dev/zero | tr '\\0' '\\377'", user="user", timeout_s=30)
    assert ran == Ran(0, "\ufffd" * 3000)
    ran = box.exec("head -c 9000 /dev/zero", user="user", timeout_s=30)
    assert ran.output == CUT.join(["\0" * HALF_OUTPUT] * 2)


@sdk
def test_the_quota_and_a_wrong_key_are_told(server: E2bServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.refuse = 1
    starter = _starter(server)
    with pytest.raises(ProviderFailed, match=r"the quota of boxes is reached.*quota of 20 sandboxes"):
        starter.provider.start(OWNER, BoxRecipe(), timeout_s=5)
    server.refuse = 2
    starter.start(OWNER, BoxRecipe())
    assert starter.counts["failed"] == 2
    wrong = open_provider("e2b", **{**server.options, "api_key": "e2b_" + "1" * 40})
    with pytest.raises(InnerError, match="refuses the key"):
        wrong.start(BoxOwner("r", "0", 0, "1"), BoxRecipe(), timeout_s=5)
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(InnerError, match="E2B_API_KEY is not set"):
        open_provider("e2b")


@sdk
def test_a_key_that_the_server_forbids_is_told_at_once(server: E2bServer) -> None:
    """Before: a 403 counted as a fault of the infrastructure, and a start tried again for five minutes."""
    server.forbids = True
    starter = _starter(server)
    for recipe in (BoxRecipe(), BoxRecipe(base="debian")):
        with pytest.raises(InnerError, match=r"refuses the key: 403: this team is blocked\. Set E2B_API_KEY"):
            starter.start(OWNER, recipe)
    with pytest.raises(InnerError, match="refuses the key"):
        starter.sweep({"run": "r"})
    assert starter.counts["failed"] == 0

"""Boxes through Modal's own SDK, against the Modal of the tests."""

from collections.abc import Iterator

import pytest
from grpclib import Status

from inner.errors import InnerError
from inner.extras.boxes.box import BoxGone, BoxOwner, BoxRecipe, ProviderFailed, Ran
from inner.extras.boxes.starting import BoxStarter, open_provider
from tests.support.modal_server import ModalPlatform
from tests.support.planted_boxes import VirtualClock, namespaces_work

OWNER = BoxOwner("my run", "0", 1, "g1/k2")
pytestmark = pytest.mark.skipif(not namespaces_work(), reason="unshare may not make namespaces here")


@pytest.fixture
def platform() -> Iterator[ModalPlatform]:
    with ModalPlatform() as platform:
        yield platform


def _starter() -> BoxStarter:
    clock = VirtualClock()
    return BoxStarter(open_provider("modal"), clock=clock, sleep=clock.sleep, seed=0)


def test_the_five_verbs(platform: ModalPlatform) -> None:
    starter = _starter()
    box = starter.start(OWNER, BoxRecipe(files={"/app/a.txt": b"one", "/app/large": b"x" * 3_000_000}, ttl_s=99))
    assert box.exec("cat a.txt; echo two >&2; exit 3", user="someone", timeout_s=30) == Ran(3, "onetwo\n")
    assert platform.server.users == ["root", "root", "root", "1000"]
    assert box.exec("wc -c < large", user="root", timeout_s=30) == Ran(0, "3000000\n")
    assert box.exec("sleep 100", user="user", timeout_s=0.5).timed_out
    assert box.exec("sleep 1000 & echo started; exit 3", user="user", timeout_s=5) == Ran(3, "started\n")
    box.write("b/c.bin", b"\x00\xff")
    assert box.read("/app/b/c.bin") == b"\x00\xff" and len(box.read("large")) == 3_000_000
    box.exec("mkfifo pipe", user="root", timeout_s=30)
    with pytest.raises(FileNotFoundError):
        box.read("absent")
    with pytest.raises(FileNotFoundError):
        box.read("pipe")
    with pytest.raises(FileExistsError):
        box.write("pipe", b"")
    ((_, told),) = platform.server.boxes.values()
    assert told.timeout_secs == 99 and told.name.startswith("box-")
    assert starter.sweep({"run": "other"}) == 0
    assert starter.sweep({"run": "my run"}) == 1 and platform.server.boxes == {}
    box.stop()


def test_a_box_without_a_network_is_created_so(platform: ModalPlatform) -> None:
    provider = open_provider("modal")
    provider.start(OWNER, BoxRecipe(), timeout_s=60)
    provider.start(BoxOwner("r", "0", 1, "2"), BoxRecipe(offline=True), timeout_s=60)
    assert platform.server.blocked == [False, True]


@pytest.mark.slow
def test_much_output_is_cut_in_the_box(platform: ModalPlatform) -> None:
    box = _starter().start(OWNER, BoxRecipe())
    ran = box.exec("head -c 200000000 /dev/zero | tr '\\0' x; echo last", user="user", timeout_s=120)
    assert ran.output.endswith("last\n") and len(ran.output) < 8300


def test_a_lost_reply_is_adopted_and_makes_no_second_box(platform: ModalPlatform) -> None:
    platform.server.faults += [("SandboxCreateV2", "lose", None)] * 20
    starter = _starter()
    box = starter.start(OWNER, BoxRecipe(files={"a.txt": b"one"}, folder="/work"))
    assert len(platform.server.boxes) == 1 and starter.counts["adopted"] == 1
    assert box.exec("pwd; cat a.txt", user="user", timeout_s=30).output == "/work\none", "the tags say the folder"
    with pytest.raises(ProviderFailed, match="AlreadyExists"):
        starter.provider.start(OWNER, BoxRecipe(), timeout_s=60)
    starter.release(OWNER)
    assert platform.server.boxes == {}


def test_all_pages_of_the_list_are_swept(platform: ModalPlatform) -> None:
    starter = _starter()
    for place in "12345":
        starter.start(BoxOwner("r", "0", 1, place), BoxRecipe())
    assert starter.sweep({"run": "r"}) == 5 and platform.server.boxes == {}


def test_a_dead_box_is_gone(platform: ModalPlatform) -> None:
    box = _starter().start(OWNER, BoxRecipe())
    platform.server.dead = set(platform.server.boxes)
    with pytest.raises(BoxGone):
        box.exec("true", user="user", timeout_s=5)
    with pytest.raises(BoxGone):
        box.write("a", b"")


def test_the_quota_a_hung_start_and_wrong_credentials_are_told(platform: ModalPlatform) -> None:
    provider = open_provider("modal")
    platform.refuse("SandboxCreateV2", 1, Status.RESOURCE_EXHAUSTED)
    with pytest.raises(ProviderFailed, match="the quota of sandboxes is reached"):
        provider.start(OWNER, BoxRecipe(), timeout_s=60)
    with pytest.raises(ProviderFailed, match="TimeoutError"):
        provider.start(OWNER, BoxRecipe(), timeout_s=0.0)
    platform.refuse("SandboxCreateV2", 1, Status.UNAUTHENTICATED)
    with pytest.raises(InnerError, match="Modal refuses the credentials"):
        provider.start(OWNER, BoxRecipe(), timeout_s=60)

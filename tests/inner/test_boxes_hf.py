"""Boxes through huggingface_hub's own sandboxes, against the Hub of the tests."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from inner.errors import InnerError
from inner.extras.boxes import hf_boxes
from inner.extras.boxes.box import BoxGone, BoxOwner, BoxRecipe, ProviderFailed, Ran
from inner.extras.boxes.starting import BoxStarter, open_provider
from tests.support.hf_boxes import BoxHub
from tests.support.planted_boxes import VirtualClock, namespaces_work

OWNER = BoxOwner("run", "0", 1, "g1/k2")
JOBS = r"^/api/jobs/[^/]+$"
pytestmark = pytest.mark.skipif(not namespaces_work(), reason="unshare may not make namespaces here")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[BoxHub]:
    with BoxHub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        for name, value in hub.environ.items():
            monkeypatch.setenv(name, value)
        yield hub


def _starter() -> BoxStarter:
    clock = VirtualClock()
    return BoxStarter(open_provider("hf"), clock=clock, sleep=clock.sleep, seed=0)


def test_the_five_verbs(hub: BoxHub) -> None:
    starter = _starter()
    box = starter.start(OWNER, BoxRecipe(files={"/app/a.txt": b"one", "large": b"x" * 3_000_000}, ttl_s=99))
    assert box.exec("cat a.txt; echo two >&2; exit 3", user="someone", timeout_s=30) == Ran(3, "onetwo\n")
    assert hub.users == ["root", "1000"]
    assert box.exec("wc -c < large", user="root", timeout_s=30) == Ran(0, "3000000\n")
    assert box.exec("sleep 100", user="user", timeout_s=0.5).timed_out
    assert box.exec("sleep 1000 & echo started; exit 3", user="user", timeout_s=5) == Ran(3, "started\n")
    box.write("b/c.bin", b"\x00\xff")
    assert box.read("/app/b/c.bin") == b"\x00\xff" and len(box.read("large")) == 3_000_000
    box.exec("mkfifo pipe", user="root", timeout_s=30)
    with pytest.raises(FileNotFoundError):
        box.read("absent")
    with pytest.raises(FileExistsError):
        box.write("pipe", b"")
    (job,) = hub.jobs.values()
    assert job.asked["environment"]["SBX_IDLE_TIMEOUT"] == "99" and job.asked["labels"]["box-place"] == "g1-k2"
    assert starter.sweep({"run": "other"}) == 0
    assert starter.sweep({"run": "run"}) == 1 and hub.live_boxes() == 0
    box.stop()


def test_a_box_without_a_network_is_refused_because_each_has_one(hub: BoxHub) -> None:
    with pytest.raises(InnerError, match=r"always has a network, and this task asks for none .* another provider"):
        open_provider("hf").start(OWNER, BoxRecipe(offline=True), timeout_s=60)
    assert not hub.jobs


@pytest.mark.slow
def test_much_output_is_cut_in_the_box(hub: BoxHub) -> None:
    ran = _starter().start(OWNER, BoxRecipe()).exec("head -c 200000000 /dev/zero", user="user", timeout_s=120)
    assert len(ran.output) < 8300


def test_a_lost_reply_is_adopted_and_makes_no_second_box(hub: BoxHub) -> None:
    hub.fault("lost", method="POST", path=JOBS)
    starter = _starter()
    box = starter.start(OWNER, BoxRecipe(files={"a.txt": b"one"}, folder="/work"))
    assert hub.live_boxes() == 1 and starter.counts["adopted"] == 1
    assert box.exec("pwd; cat a.txt", user="user", timeout_s=30).output == "/work\none", "the job says the folder"
    starter.release(OWNER)
    assert hub.live_boxes() == 0


@pytest.mark.slow
def test_a_box_that_still_starts_is_waited_for(hub: BoxHub) -> None:
    hub.held = True
    hub.fault("lost", method="POST", path=JOBS)
    threading.Timer(1.5, setattr, (hub, "held", False)).start()
    starter = _starter()
    assert starter.start(OWNER, BoxRecipe(files={"a.txt": b"one"})).read("a.txt") == b"one"
    assert hub.live_boxes() == len(hub.jobs) == 1 and starter.counts["adopted"] == 1


@pytest.mark.parametrize("kind", [ProviderFailed, BoxGone])
def test_an_answer_that_is_no_json_is_the_providers_failure(kind: Any) -> None:
    with pytest.raises(kind, match="JSONDecodeError"), hf_boxes._as_ours(kind):
        json.loads("<html>")
    with pytest.raises(InnerError, match="ours"), hf_boxes._as_ours(kind):
        raise InnerError("ours")


def test_a_dead_box_is_gone(hub: BoxHub) -> None:
    box = _starter().start(OWNER, BoxRecipe())
    hub.dead = set(hub.boxes)
    with pytest.raises(BoxGone):
        box.exec("true", user="user", timeout_s=5)
    for verb in (lambda: box.write("a", b""), lambda: box.read("a")):
        with pytest.raises(BoxGone):
            verb()


def test_the_price_of_a_box_is_the_hubs_for_its_flavor(hub: BoxHub) -> None:
    assert open_provider("hf").price_per_hour == pytest.approx(0.01, rel=0.01)  # the Hub tells it per minute
    assert open_provider("hf", flavor="t4-small").price_per_hour == pytest.approx(0.40, rel=0.01)
    assert open_provider("hf", flavor="unknown").price_per_hour is None


def test_the_quota_and_a_wrong_token_are_told(hub: BoxHub, monkeypatch: pytest.MonkeyPatch) -> None:
    provider = open_provider("hf")
    hub.fault("429", method="POST", path=JOBS, times=20)
    with pytest.raises(ProviderFailed, match="the quota of jobs is reached"):
        provider.start(OWNER, BoxRecipe(), timeout_s=5)
    hub.faults.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(InnerError, match="Hugging Face refuses the token"):
        provider.start(OWNER, BoxRecipe(), timeout_s=5)
    with pytest.raises(InnerError, match="Hugging Face refuses the token"):
        open_provider("hf")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(InnerError, match="HF_TOKEN is not set"):
        open_provider("hf")

"""64 episodes of 20 turns through each provider, with planted faults: no orphan, no double, exact verdicts.

    Faulty(provider)   5 % of starts hang · 10 % of create replies are lost · 15 % of boxes end at some call
                       "break" ends the box, in a fresh one, too: the policy's fault

Commands, files and verifiers are real, in namespaces: local boxes, and servers of E2B's, Modal's and the Hub's API.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from inner.extras.boxes.box import Box, BoxGone, BoxOwner, BoxProvider, BoxRecipe, ProviderFailed, Ran
from inner.extras.boxes.local import LocalBoxes
from inner.extras.boxes.starting import BoxStarter, open_provider
from inner.extras.boxes.world import harbor_environment
from inner.tasks.harbor import HarborTask
from inner.usercode.attempts import AtMostWorst
from tests.support.e2b_server import E2bServer
from tests.support.hf_boxes import BoxHub
from tests.support.modal_server import ModalPlatform
from tests.support.planted_boxes import VirtualClock, namespaces, namespaces_work

EPISODES, TURNS, SEED = 64, 20, 7
PATIENCE_S = 30.0
VERIFY = "Y3AgL2FwcC9hbnN3ZXIgL2xvZ3MvdmVyaWZpZXIvcmV3YXJkLnR4dAo="  # cp /app/answer /logs/verifier/reward.txt
TASK = HarborTask(
    name="t", instruction="i", image="", folder="/app", files={}, tests={"/tests/test.sh": VERIFY}, agent_s=1e6,
    verifier_s=60,
).dump()  # fmt: skip


class Faulty:
    """A provider with planted faults; each is a function of the seed, the owner and the number of its create."""

    price_per_hour = None

    def __init__(self, inner: BoxProvider, clock: VirtualClock) -> None:
        self.inner, self.clock, self.lock = inner, clock, threading.Lock()
        self.asked, self.made = Counter[str](), Counter[str]()
        self.dies_at, self.died = dict[str, int](), set[str]()

    def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> "FaultyBox":
        with self.lock:
            self.asked[owner.key] += 1
            chance = random.Random(f"{SEED} {owner.place} {self.asked[owner.key]}")
        if chance.random() < 0.05:
            self.clock.sleep(60.0)
            raise ProviderFailed("the start hung for 60 s")
        box = self.inner.start(owner, recipe, timeout_s=60.0)
        with self.lock:
            self.made[owner.key] += 1
            if chance.random() < 0.15:
                self.dies_at[owner.key] = chance.randrange(TURNS)
        if chance.random() < 0.1:
            raise ProviderFailed("the reply of the create was lost")
        return FaultyBox(self, box, owner.key)

    def find(self, labels: Mapping[str, str]) -> list[Any]:
        found = self.inner.find(labels)
        key = BoxOwner(labels["run"], labels["slot"], 1, labels["place"]).key if "place" in labels else ""
        return [FaultyBox(self, box, key) for box in found]


class FaultyBox:
    def __init__(self, provider: Faulty, box: Box, key: str) -> None:
        self.provider, self.box, self.key, self.calls = provider, box, key, 0

    def exec(self, command: str, *, user: str, timeout_s: float) -> Ran:
        if user != "root":  # a turn of the model
            if command == "break" or self.calls == self.provider.dies_at.get(self.key):
                self.provider.died |= {self.key} if command != "break" else set()
                self.box.stop()
                raise BoxGone("planted")
            self.calls += 1
        return self.box.exec(command, user=user, timeout_s=timeout_s)

    def read(self, path: str) -> bytes:
        return self.box.read(path)

    def write(self, path: str, data: bytes) -> None:
        self.box.write(path, data)

    def stop(self) -> None:
        self.box.stop()


def _plans() -> list[list[str]]:
    chance = random.Random(SEED)
    plans = [[f"echo {turn} >> log" for turn in range(TURNS - 1)] + [f"echo {n % 2} > answer"] for n in range(EPISODES)]
    for plan in plans:
        if chance.random() < 0.15:
            plan[chance.randrange(TURNS - 1)] = "break"
    return plans


@pytest.fixture(params=["local", "e2b", "modal", "hf"])
def provider(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BoxProvider]:
    if request.param == "e2b":
        pytest.importorskip("e2b", reason="make test-boxes has it")
    with ExitStack() as servers:
        if request.param == "local":
            yield LocalBoxes(tmp_path, wrap=namespaces)
        elif request.param == "e2b":
            server = servers.enter_context(E2bServer(tmp_path))
            servers.callback(server.shutdown)
            yield open_provider("e2b", **server.options)
        elif request.param == "modal":
            servers.enter_context(ModalPlatform())
            yield open_provider("modal")
        else:
            hub = servers.enter_context(BoxHub())
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
            monkeypatch.setenv("HF_TOKEN", hub.token)
            yield open_provider("hf")


@pytest.mark.skipif(not namespaces_work(), reason="unshare may not make namespaces here")
def test_a_command_that_no_program_can_get_is_an_error_and_the_box_lives(provider: BoxProvider) -> None:
    """Before: a NUL or half of an emoji in a command was the death of its box, and the policy was to blame for it."""
    Harbor = harbor_environment(BoxStarter(provider))
    Harbor._session = ("nonce", "r00", 1)
    env = Harbor()
    env.reset(TASK)
    for part in ("\0", "\ud83d", "x" * (1 << 17)):
        with pytest.raises((ValueError, OSError)):
            env.bash(f"echo {part} > answer")
    assert env.bash("echo 1 > answer; echo here") == "here\n" and env.get_reward() == 1


@pytest.mark.slow
@pytest.mark.skipif(not namespaces_work(), reason="unshare may not make namespaces here")
def test_planted_faults_through_every_provider(provider: BoxProvider, tmp_path: Path) -> None:
    clock = VirtualClock()
    faulty = Faulty(provider, clock)
    starter = BoxStarter(faulty, clock=clock, sleep=clock.sleep, seed=0, budget_s=1e6)
    Harbor = harbor_environment(starter)
    Harbor._session = ("nonce", "r00", 1)

    def play(n: int, plan: list[str]) -> float | None:
        env = Harbor()
        env._place = f"e{n}"
        env.reset(TASK)
        for command in plan:
            env.bash(command)
        return env.get_reward()

    plans = _plans()
    with ThreadPoolExecutor(8) as pool:
        rewards = list(pool.map(play, range(EPISODES), plans))
    assert provider.find({"run": "nonce"}) == [], "no orphan before any stop"
    assert starter.sweep({"run": "nonce"}) == 0
    assert set(faulty.made.values()) == {1}, "no double: one create that worked per owner"
    for n, (plan, reward) in enumerate(zip(plans, rewards, strict=True)):
        if BoxOwner("nonce", "r00", 1, f"e{n}-1").key in faulty.died:
            assert reward is None
        elif "break" in plan:
            assert isinstance(reward, AtMostWorst)
        else:
            assert reward == n % 2
    counts = starter.counts
    print(dict(counts))
    assert counts["episodes"] == EPISODES and counts["provider"] == rewards.count(None) > 0 < counts["policy"]
    assert counts["adopted"] > 0 and counts["failed"] > counts["adopted"]
    if isinstance(provider, LocalBoxes):
        until = time.monotonic() + PATIENCE_S
        while left := [
            _read(one) for one in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(one)
        ]:
            assert time.monotonic() < until, f"processes of a box: {left}"  # a killed one ends a moment later
            time.sleep(0.05)


def _read(file: Path) -> bytes:
    with suppress(OSError):  # the process ended
        return file.read_bytes()
    return b""

"""Boxes: starts, owners, blame, Harbor tasks. Local boxes run real processes in namespaces of unshare."""

import errno
import json
import math
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inner.errors import InnerError, SandboxMissing
from inner.extras.boxes import episode, kept, local, starting
from inner.extras.boxes.box import (
    CUT,
    HALF_OUTPUT,
    Box,
    BoxGone,
    BoxOwner,
    BoxRecipe,
    ProviderFailed,
    Ran,
    read_output,
    wrapped_command,
)
from inner.extras.boxes.episode import Episode, read_number
from inner.extras.boxes.local import LocalBoxes
from inner.extras.boxes.starting import BoxStarter, Used, open_provider
from inner.extras.boxes.verdict import blame
from inner.extras.boxes.world import GONE, OVER, HarborEnvironment, harbor_environment
from inner.extras.deletion.harbor import write_harbor
from inner.extras.deletion.judge import DeletionTask, HiddenTest
from inner.rollouts.at_once.lanes import Lanes
from inner.rollouts.at_once.tools import ToolsAtOnce
from inner.settings.inner import InnerConfig, Seeds
from inner.tasks.harbor import HarborTask, load_harbor, make_rows, read_tasks, unpack
from inner.tasks.spec import TaskSpec
from inner.train.build import build_inner
from inner.usercode.attempts import AtMostWorst
from tests.inner.test_tools_at_once import PATIENCE_S, asks
from tests.inner.test_toolworld import WORLD, small_folder
from tests.support.planted_boxes import PlantedBox, PlantedBoxes, VirtualClock, namespaces, namespaces_work

OWNER = BoxOwner("run", "0", 1, "7")
TASK = HarborTask(
    name="t", instruction="answer", image="", folder="/app", files={}, tests={}, agent_s=600, verifier_s=60
).dump()
bubblewrap_works = pytest.mark.skipif(
    subprocess.run("bwrap --unshare-all --ro-bind / / true", shell=True, capture_output=True).returncode != 0,
    reason="bwrap is not here, or may not make namespaces: apt-get install bubblewrap",
)
real = pytest.mark.skipif(not namespaces_work(), reason="unshare may not make namespaces here")


def _starter(provider: Any, clock: VirtualClock, **settings: Any) -> BoxStarter:
    return BoxStarter(provider, clock=clock, sleep=clock.sleep, seed=0, **settings)


# -------------------------------------------------------------------- 64 episodes of 20 turns


def _play(provider: PlantedBoxes, plans: list[list[str]]) -> tuple[list[float | None], BoxStarter]:
    starter = _starter(provider, provider.clock)
    Harbor = harbor_environment(starter)
    Harbor._session = ("run", "0", 1)
    rewards = list[float | None]()
    for i, plan in enumerate(plans):
        env = Harbor()
        env._place = f"e{i}"
        env.reset(TASK)
        for command in plan:
            env.bash(command)
        rewards.append(env.get_reward())
    return rewards, starter


def _plans(n: int) -> list[list[str]]:
    chance = random.Random(5)
    plans = [["turn"] * 19 + [f"answer {int(chance.random() < 0.875)}"] for _ in range(n)]
    for plan in plans:
        if chance.random() < 0.2:
            plan[chance.randrange(19)] = "break"
    return plans


@pytest.mark.parametrize("n", [64, 512])
def test_planted_faults_leave_no_orphan_no_double_and_exact_marks(n: int) -> None:
    provider = PlantedBoxes(VirtualClock(), seed=3, deaths=0.15, hung=0.05, lost=0.1)
    plans = _plans(n)
    rewards, starter = _play(provider, plans)
    assert provider.alive == {}
    assert starter.sweep({"run": "run"}) == 0
    marks = (starter.counts["episodes"], starter.counts["provider"], starter.counts["policy"])
    print(starter.counts)
    assert marks == (n, rewards.count(None), sum(isinstance(r, AtMostWorst) for r in rewards))
    assert starter.counts["adopted"] > 0 and starter.counts["failed"] > starter.counts["adopted"]
    for i, plan in enumerate(plans):
        own = [box for box in provider.made if box.owner.place == f"e{i}-1"]
        assert len(own) == 1, "one create that worked per episode"
        if own[0].died == "provider":
            assert rewards[i] is None
        elif "break" in plan:
            assert isinstance(rewards[i], AtMostWorst)
        else:
            assert rewards[i] == float(plan[-1].split()[1])


def test_the_mean_is_that_of_a_world_without_faults_and_both_wrong_rules_are_not() -> None:
    plans = _plans(512)
    clean, _ = _play(PlantedBoxes(VirtualClock()), plans)
    found, _ = _play(PlantedBoxes(VirtualClock(), seed=3, deaths=0.15, hung=0.05, lost=0.1), plans)
    assert None not in clean
    truth = _mean(clean)
    noise = 2 * math.sqrt(truth * (1 - truth) / len(plans))
    zeros = [0.0 if r is None else r for r in found]
    nones = [None if isinstance(r, AtMostWorst) else r for r in found]
    print(
        f"truth {truth:.3f} ± {noise:.3f}  ours {_mean(found):.3f}  zeros {_mean(zeros):.3f}  nones {_mean(nones):.3f}"
    )
    assert abs(_mean(found) - truth) < noise
    assert _mean(zeros) < truth - noise
    assert _mean(nones) > truth + noise


def _mean(rewards: Sequence[float | None]) -> float:
    counted = [r for r in rewards if r is not None]
    return sum(counted) / len(counted)


# -------------------------------------------------------------------- starts


def test_a_lost_reply_is_adopted() -> None:
    clock = VirtualClock()
    provider = PlantedBoxes(clock, lost=1.0)
    starter = _starter(provider, clock)
    box = starter.start(OWNER, BoxRecipe())
    assert isinstance(box, PlantedBox) and provider.made == [box] and starter.counts["adopted"] == 1
    starter.release(OWNER)
    assert provider.alive == {}


def test_a_start_ends_at_its_budget_and_says_so() -> None:
    clock = VirtualClock()
    with pytest.raises(ProviderFailed, match="no box within 300 s: the start hung for 60 s"):
        _starter(PlantedBoxes(clock, hung=1.0), clock).start(OWNER, BoxRecipe())
    assert clock.now == pytest.approx(300)


def test_box_seconds_are_counted_when_no_box_runs() -> None:
    clock, told = VirtualClock(), list[tuple[float, float | None]]()
    starter = _starter(PlantedBoxes(clock), clock)
    other = BoxOwner("run", "0", 1, "8")
    starter.start(OWNER, BoxRecipe())
    clock.sleep(10)
    starter.start(other, BoxRecipe())
    clock.sleep(5)
    starter.release(OWNER)
    assert starter.take_used() is None, "one still runs"
    clock.sleep(100)
    starter.on_used = lambda *used: told.append(used)
    starter.release(other)
    starter.release(other)
    assert told == [(105, starter.provider.price_per_hour)], "each box once, when it ends"
    assert starter.take_used() == Used(2, 15 + 105) and starter.take_used() is None


class _Lossy(PlantedBoxes):
    """Its creates take effect, take 5 s, and say nothing."""

    def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> PlantedBox:
        super().start(owner, recipe, timeout_s=timeout_s)
        self.clock.sleep(5)
        raise ProviderFailed("the reply of the create was lost")


def _told(starter: BoxStarter) -> list[float]:
    told = list[float]()
    starter.on_used = lambda seconds, usd_per_hour: told.append(seconds)
    return told


def test_an_adopted_box_counts_from_its_create() -> None:
    clock = VirtualClock()
    starter = _starter(_Lossy(clock), clock)
    told = _told(starter)
    starter.start(OWNER, BoxRecipe())
    assert clock.now > 5, "the pause before the look-up"
    clock.sleep(10)
    starter.release(OWNER)
    assert told == [clock.now]


def test_a_box_of_a_start_that_gave_up_counts_until_it_is_swept() -> None:
    class Blind(_Lossy):
        def find(self, labels: Mapping[str, str]) -> list[PlantedBox]:
            if self.clock.now < 300:
                raise ProviderFailed("the list does not answer")
            return super().find(labels)

    clock = VirtualClock()
    starter = _starter(Blind(clock), clock)
    told = _told(starter)
    with pytest.raises(ProviderFailed):
        starter.start(OWNER, BoxRecipe())
    clock.sleep(9)
    starter.release(OWNER)
    assert told == [clock.now] and starter.take_used() == Used(1, clock.now)


def test_a_box_that_dies_while_it_is_furnished_counts_and_one_that_never_was_does_not() -> None:
    class Fragile(PlantedBox):
        def write(self, path: str, data: bytes) -> None:
            self.provider.clock.sleep(7)
            if self.number == 0:
                raise BoxGone("lost")

    class Boxes(PlantedBoxes):
        def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> PlantedBox:
            return Fragile(self, owner, None)

    clock = VirtualClock()
    starter = _starter(Boxes(clock), clock)
    told = _told(starter)
    starter.start(OWNER, BoxRecipe(files={"/app/a": b""}))
    starter.release(OWNER)
    assert told == pytest.approx([7, 7])
    starter = _starter(PlantedBoxes(clock, hung=1.0), clock)
    told = _told(starter)
    with pytest.raises(ProviderFailed):
        starter.start(OWNER, BoxRecipe())
    starter.release(OWNER)
    assert told == [] and starter.take_used() is None


@pytest.mark.parametrize("generation", [1, 2])
def test_a_provider_that_cannot_be_opened_yet_is_opened_later(generation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub's whoami, Modal's look-up of the app: a server error there once ended the replica."""
    clock, asked = VirtualClock(), list[str]()

    def open_late(name: str, **options: Any) -> PlantedBoxes:
        asked.append(name)
        if len(asked) <= 2:
            raise ProviderFailed("HTTP 500")
        return PlantedBoxes(clock)

    monkeypatch.setattr(starting, "open_provider", open_late)
    Harbor = harbor_environment("hf")
    host: Any = SimpleNamespace(owner=("n", "r01", generation), rented=print, emit=lambda *_, **__: None)
    Harbor._report_to(host)
    Harbor._shared.starter.clock, Harbor._shared.starter._sleep = clock, clock.sleep
    env = Harbor()
    env.reset(TASK)
    assert env.bash("answer 1") == "ok" and env.get_reward() == 1.0 and asked == ["hf"] * 3


def test_failures_in_a_row_pause_the_starts_of_all() -> None:
    clock = VirtualClock()
    starter = _starter(PlantedBoxes(clock, hung=1.0), clock, failures=2, pause_s=1000.0)
    with pytest.raises(ProviderFailed):
        starter.start(OWNER, BoxRecipe())
    assert (starter.counts["started"], starter.counts["failed"], starter.counts["pauses"]) == (0, 2, 1)
    with pytest.raises(ProviderFailed, match="the starts were paused"):
        starter.start(BoxOwner("run", "0", 1, "8"), BoxRecipe())


def test_only_so_many_boxes_are_starting_while_any_number_runs() -> None:
    class Slow(PlantedBoxes):
        now, most = 0, 0

        def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> PlantedBox:
            with lock:
                self.now += 1
                self.most = max(self.most, self.now)
            full.wait(120)  # three starts are in here together, or this fails
            with lock:
                self.now -= 1
                return super().start(owner, recipe, timeout_s=timeout_s)

    lock, full, provider = threading.Lock(), threading.Barrier(3), Slow(VirtualClock())
    starter = BoxStarter(provider, at_once=3)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda i: starter.start(BoxOwner("run", "0", 1, str(i)), BoxRecipe()), range(12)))
    assert provider.most == 3 and len(provider.alive) == 12
    assert starter.sweep({"run": "run"}) == 12 and provider.alive == {}


def test_a_sweep_that_cannot_stop_all_says_so() -> None:
    class Stuck(PlantedBoxes):
        def find(self, labels: Mapping[str, str]) -> list[PlantedBox]:
            return self.made

    provider = Stuck(VirtualClock())
    starter = BoxStarter(provider)
    starter.start(OWNER, BoxRecipe())
    with pytest.raises(ProviderFailed, match=r"1 boxes with .* still run"):
        starter.sweep({"run": "run"})


def test_a_stop_that_fails_once_leaves_no_box() -> None:
    """One 503 must not keep a sweep from the other boxes, nor from this one at its next look."""

    class Refusing(PlantedBox):
        failed = False

        def stop(self) -> None:
            if self.number == 0 and not self.failed:
                self.failed = True
                raise ProviderFailed("503")
            super().stop()

    class Provider(PlantedBoxes):
        def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> PlantedBox:
            return Refusing(self, owner, None)

    provider = Provider(VirtualClock())
    starter = BoxStarter(provider)
    for place in "12345678":
        starter.start(BoxOwner("a", "0", 1, place), BoxRecipe())
    assert starter.sweep({"run": "a"}) == 8 and not provider.alive


def test_a_run_sweeps_only_its_own() -> None:
    provider = PlantedBoxes(VirtualClock())
    starter = BoxStarter(provider)
    for run in ("a", "b"):
        starter.start(BoxOwner(run, "0", 1, "7"), BoxRecipe())
    assert starter.sweep({"run": "a"}) == 1
    assert [box.owner.run for box in provider.alive.values()] == ["b"]


def test_a_new_box_that_dies_is_replaced() -> None:
    class Fragile(PlantedBox):
        def write(self, path: str, data: bytes) -> None:
            if self.number == 0:
                raise BoxGone("lost")

    class Provider(PlantedBoxes):
        def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> PlantedBox:
            return Fragile(self, owner, None)

    clock = VirtualClock()
    provider = Provider(clock)
    box = _starter(provider, clock).start(OWNER, BoxRecipe(files={"/app/a": b""}))
    assert list(provider.alive.values()) == [box] and len(provider.made) == 2


# -------------------------------------------------------------------- blame


class _Dies:
    """A box that dies at one of its calls."""

    def __init__(self, at: int | None) -> None:
        self.left = at

    def call(self) -> None:
        if self.left == 0:
            raise BoxGone("died")
        self.left = None if self.left is None else self.left - 1


@pytest.mark.parametrize(
    ("fresh", "expected"),
    [
        ([None], "provider"),  # survives the command that killed the first
        ([2, 2], "policy"),  # two die at the same one
        ([2, None], "provider"),  # one death there may be chance
        ([1, 2, "no box", 2], "policy"),  # an earlier death says nothing
        ([0, 1, 0, 2], "provider"),  # no answer: not the policy's
        (["no box"] * 4, "provider"),
    ],
)
def test_a_fresh_box_decides(fresh: list[Any], expected: str) -> None:
    released = list[int]()

    def open_fresh(n: int) -> Box:
        if fresh[n] == "no box":
            raise ProviderFailed("no box")
        return _Dies(fresh[n])  # pyright: ignore[reportReturnType]

    actions = [lambda box: box.call()] * 3  # pyright: ignore
    assert blame(actions, open_fresh, released.append) == expected
    assert released == list(range(len(fresh)))


@pytest.mark.parametrize(("breaks", "expected"), [("turn", 0.0), ("", None)])
def test_a_verifier_that_ends_every_box_is_not_the_policys_fault(breaks: str, expected: float | None) -> None:
    """Before: if the verifier's own memory ended its box, each rollout of its task had 0, whatever the policy did."""

    class Box(PlantedBox):
        ran = ""

        def exec(self, command: str, *, user: str, timeout_s: float) -> Ran:
            if command == episode.VERIFIER and breaks in self.ran:
                self._die("memory")
            self.ran += command
            return super().exec(command, user=user, timeout_s=timeout_s)

    class Provider(PlantedBoxes):
        def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> PlantedBox:
            return Box(self, owner, None)

    said = list[str]()
    starter = _starter(Provider(clock := VirtualClock()), clock)
    one = Episode(starter, OWNER, load_harbor(TASK), lambda event, text: said.append(f"{event}: {text}"))
    assert one.begin() and one.act(lambda box: box.exec("turn", user="user", timeout_s=1)).code == 0
    assert (found := one.reward()) == expected and isinstance(found, AtMostWorst) == bool(breaks)
    assert not starter.provider.find({})
    assert breaks or said == [
        "reward_failed: no episode had touched this box of the Harbor task t, and it died at the verifier: the box "
        "died: memory"
    ]


@pytest.mark.parametrize("call", [1, 2, 3])
def test_a_key_that_is_refused_within_an_episode_is_not_the_policys_fault(call: int) -> None:
    """Before: get_reward raised, which is a broken judge if another rollout of the batch has its number already."""

    class Box(PlantedBox):
        def exec(self, command: str, *, user: str, timeout_s: float) -> Ran:
            provider.calls += 1
            if provider.calls == call + 1:  # the first call prepares the box
                provider.is_refused = True
            provider.check()
            return super().exec(command, user=user, timeout_s=timeout_s)

        def stop(self) -> None:
            provider.check()

    class Provider(PlantedBoxes):
        calls, is_refused = 0, False

        def check(self) -> None:
            if self.is_refused:
                raise InnerError("the server refuses the key")

        def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> PlantedBox:
            self.check()
            return Box(self, owner, None)

    provider, said = Provider(clock := VirtualClock()), list[str]()
    one = Episode(_starter(provider, clock), OWNER, load_harbor(TASK), lambda event, text: said.append(text))
    assert one.begin()
    with suppress(InnerError):  # the model gets it as the tool's error
        one.act(lambda box: box.exec("turn", user="user", timeout_s=1))
    assert one.reward() is None and said == ["the server refuses the key"]


def test_a_session_stops_what_its_predecessors_left_and_nothing_else() -> None:
    provider = PlantedBoxes(VirtualClock())
    starter = BoxStarter(provider)
    owners = [BoxOwner("n", "r01", 1, "a"), BoxOwner("n", "r01", 2, "b"), BoxOwner("n", "r01", 3, "mine")]
    for owner in (*owners, BoxOwner("n", "r02", 1, "other slot"), BoxOwner("m", "r01", 1, "other run")):
        starter.start(owner, BoxRecipe())
    host: Any = SimpleNamespace(owner=("n", "r01", 3), rented=print)
    harbor_environment(starter)._report_to(host)
    assert sorted(box.owner.place for box in provider.alive.values()) == ["mine", "other run", "other slot"]


def test_without_a_session_no_two_processes_share_an_owner() -> None:
    assert HarborEnvironment._session[0].startswith("alone-")
    assert harbor_environment(BoxStarter(PlantedBoxes(VirtualClock())))._session == HarborEnvironment._session


def test_a_provider_without_any_box_gives_none_and_the_tools_say_so() -> None:
    clock = VirtualClock()
    env = harbor_environment(_starter(PlantedBoxes(clock, hung=1.0), clock))()
    env.reset(TASK)
    assert env.bash("turn") == GONE
    assert env.get_reward() is None


def test_after_submit_and_after_the_time_limit_nothing_runs() -> None:
    clock = VirtualClock()
    Harbor = harbor_environment(_starter(PlantedBoxes(clock), clock))
    env = Harbor()
    env.reset(TASK)
    clock.sleep(1000)  # the starts of the batch's other boxes
    assert env.bash("turn") == "ok", "an episode's time begins with its first call"
    clock.sleep(601)
    assert env.bash("answer 1") == OVER and env.get_reward() == 0.0
    env.reset(TASK)
    env.bash("answer 1")
    env.submit()
    assert env.bash("answer 0") == OVER and env.get_reward() == 1.0


def test_the_log_has_a_providers_words_and_a_batch_without_boxes_is_short() -> None:
    clock, said = VirtualClock(), list[tuple[str, str]]()
    Harbor = harbor_environment(_starter(PlantedBoxes(clock, hung=1.0), clock))
    host: Any = SimpleNamespace(
        owner=("run", "0", 1), rented=lambda *_: None, emit=lambda event, text, **_: said.append((event, text))
    )
    Harbor._report_to(host)
    for _ in range(32):
        Harbor().reset(TASK)
    assert clock.now < 1800, "so many seconds of one step are a hang to the watchdog"
    assert [event for event, _ in said] == ["boxes_failed"] and "no box within 300 s: the start hung" in said[0][1]


class _Slow(PlantedBoxes):
    """Its boxes answer `wait` when they are stopped, and run one verifier at a time."""

    def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> Any:
        return _SlowBox(super().start(owner, recipe, timeout_s=timeout_s))

    def find(self, labels: Mapping[str, str]) -> Any:
        return [_SlowBox(box) for box in super().find(labels)]


class _SlowBox:
    def __init__(self, box: PlantedBox) -> None:
        self._box = box
        self.__dict__.setdefault("stopped", box.__dict__.setdefault("stopped", threading.Event()))

    def exec(self, command: str, **limits: Any) -> Ran:
        if command == "wait":
            assert self.stopped.wait(30)  # pyright: ignore
            raise BoxGone("stopped")
        return self._box.exec(command, **limits)

    def stop(self) -> None:
        self._box.stop()
        self.stopped.set()  # pyright: ignore

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)


def test_a_call_that_outlives_its_episode_says_nothing_about_the_next() -> None:
    clock = VirtualClock()
    provider = _Slow(clock)
    env = harbor_environment(_starter(provider, clock))()
    env.reset(TASK)
    late = threading.Thread(target=env.bash, args=("wait",))
    late.start()
    while not env._begun.actions:
        pass
    env.get_reward()
    env.reset(TASK)
    late.join()
    assert env.bash("answer 1") == "ok" and env.get_reward() == 1.0
    assert not provider.alive and len(provider.made) == 2, "and starts no box to look for blame"


def test_a_call_that_outlives_its_limit_decides_for_the_verdict() -> None:
    """The loop gives up while fresh boxes start, and asks for the reward. The verifier's own death says nothing."""

    class Boxes(PlantedBoxes):
        def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> PlantedBox:
            if "fresh" in owner.place:
                asked.set()
                assert go.wait(PATIENCE_S)
            return super().start(owner, recipe, timeout_s=timeout_s)

    clock, asked, go = VirtualClock(), threading.Event(), threading.Event()
    provider = Boxes(clock)
    starter = _starter(provider, clock)
    env = harbor_environment(starter)()
    env.reset(TASK)
    (tools,) = ToolsAtOnce([{"bash": env.bash}], [[asks(("bash", {"command": "break"}))]], Lanes(1, 0.2)).tools()
    with pytest.raises(TimeoutError, match="no answer"):
        tools["bash"]()
    assert asked.wait(PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(env.get_reward)
        while not env._begun._judging.locked():
            pass
        go.set()
        assert isinstance(found.result(PATIENCE_S), AtMostWorst)
    assert (starter.counts["policy"], starter.counts["provider"]) == (1, 0)
    assert provider.alive == {}


def test_a_death_beside_a_call_that_still_runs_is_one_of_either() -> None:
    """The verifier sees the dead box first; the command that killed it has not returned."""
    actions = [lambda box: box.call()] * 3  # pyright: ignore
    open_fresh: Any = lambda n: _Dies(1)  # noqa: E731
    assert blame(actions, open_fresh, lambda n: None, survived=1) == "policy"
    assert (
        blame(actions, open_fresh, lambda n: None)
        == blame(actions, open_fresh, lambda n: None, survived=2)
        == "provider"
    )


def test_a_verdict_that_comes_after_the_next_reset_ends_no_box_of_it() -> None:
    clock, go = VirtualClock(), threading.Event()
    provider = PlantedBoxes(clock)
    env = harbor_environment(_starter(provider, clock))()
    env.reset(TASK)
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(episode, "verify", lambda box, task: (begun.set(), go.wait(PATIENCE_S), 0.0)[2])
        begun = threading.Event()
        late = pool.submit(env.get_reward)
        assert begun.wait(PATIENCE_S)
        env.reset(TASK)
        go.set()
        assert late.result(PATIENCE_S) == 0.0
    assert env.bash("answer 1") == "ok" and env.get_reward() == 1.0


def test_a_verdict_that_is_asked_for_twice_at_once_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, judged, go = VirtualClock(), list[int](), threading.Event()
    env = harbor_environment(_starter(PlantedBoxes(clock), clock))()
    env.reset(TASK)
    monkeypatch.setattr(episode, "verify", lambda box, task: (judged.append(1), go.wait(30), 1.0)[2])
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(env.get_reward) for _ in range(2)]
        go.set()
    assert [one.result() for one in found] == [1.0, 1.0] and judged == [1]


# -------------------------------------------------------------------- local boxes


@pytest.fixture
def boxes(tmp_path: Path) -> LocalBoxes:
    return LocalBoxes(tmp_path / "boxes", wrap=namespaces)


@real
def test_the_five_verbs(boxes: LocalBoxes) -> None:
    box = BoxStarter(boxes).start(OWNER, BoxRecipe(files={"/app/a.txt": b"one"}))
    ran = box.exec("cat a.txt; echo two >&2; exit 3", user="user", timeout_s=30)
    assert ran == Ran(3, "onetwo\n") and not ran.timed_out
    box.write("b/c.bin", b"\x00\xff")
    assert box.exec("wc -c < /app/b/c.bin", user="user", timeout_s=30).output == "2\n"
    assert box.read("/app/a.txt") == b"one"
    with pytest.raises(FileNotFoundError):
        box.read("absent")
    assert len(boxes.find({"run": "run", "place": "7"})) == 1 and boxes.find({"run": "other"}) == []
    box.stop()
    assert boxes.find({"run": "run"}) == []
    with pytest.raises(BoxGone):
        box.exec("true", user="user", timeout_s=1)
    box.stop()


@real
def test_a_command_that_never_returns_is_a_timeout_and_the_box_lives(boxes: LocalBoxes) -> None:
    box = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    ran = box.exec("echo begun; sleep 1000", user="user", timeout_s=0.5)
    assert ran.timed_out and ran.code == 124 and ran.output == "begun\n"
    assert box.exec("echo alive", user="user", timeout_s=30).output == "alive\n"


@real
@pytest.mark.parametrize(
    "start", ["sleep 1000 &", "setsid sh -c 'trap \"\" TERM; sleep 1000' &"], ids=["job", "daemon"]
)
def test_a_process_in_the_background_does_not_hold_the_call(boxes: LocalBoxes, start: str) -> None:
    box = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    assert box.exec(f"{start} echo started; exit 3", user="user", timeout_s=5) == Ran(3, "started\n")
    ran = box.exec(f"{start} echo started; sleep 1000", user="user", timeout_s=0.5)
    assert ran == Ran(124, "started\n"), "the shell itself outlives the limit"


@real
def test_all_that_the_shell_wrote_comes_and_endless_output_of_the_background_ends_with_it(boxes: LocalBoxes) -> None:
    box = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    ran = box.exec("sleep 1000 & head -c 60000 /dev/zero | tr '\\0' x; echo last", user="user", timeout_s=30)
    assert ran == Ran(0, "x" * HALF_OUTPUT + CUT + "x" * (HALF_OUTPUT - 5) + "last\n")
    ran = box.exec("yes & head -c 9000 /dev/zero", user="user", timeout_s=30)
    assert ran.code == 0 and CUT in ran.output and len(ran.output) < 8300


def test_a_process_in_the_background_may_write_on_after_the_shells_end(tmp_path: Path) -> None:
    """Without a sandbox, as in a remote box: the process lives on, and no closed pipe kills it."""
    for name in ("go", "answer"):
        os.mkfifo(tmp_path / name)
    writes = "read word <go; head -c 200000 /dev/zero && head -c 200000 /dev/zero; echo $? >answer"
    words = wrapped_command(f"cd {tmp_path}; ({writes}) & echo started", 30)
    ran = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"started\n", b"")
    (tmp_path / "go").write_text("go\n")
    assert (tmp_path / "answer").read_text() == "0\n"


SERVER = "(while sleep .02; do date > /tmp/now; done) >/dev/null 2>&1 & echo started"
IS_UP = "rm -f /tmp/now; sleep .5; [ -f /tmp/now ]"


@real
@pytest.mark.parametrize("wrap", [namespaces, pytest.param(local.bubblewrap, marks=bubblewrap_works)])
def test_a_background_process_outlives_its_command_until_the_verifier(tmp_path: Path, wrap: local.Wrap) -> None:
    """Before: it ended with its command, as in the box of no other provider."""
    boxes = LocalBoxes(tmp_path / "boxes", wrap=wrap)
    box = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    other = boxes.start(replace(OWNER, place="8"), BoxRecipe(), timeout_s=1)
    assert box.exec(SERVER, user="user", timeout_s=30).output == "started\n"
    assert box.exec(IS_UP, user="user", timeout_s=30).code == 0
    assert other.exec(IS_UP, user="user", timeout_s=30).code == 1
    assert box.exec(IS_UP, user="root", timeout_s=30).code == 1, "else the episode could write its own reward"
    assert box.exec("pkill -9 -f 'sleep infinity; exit'", user="user", timeout_s=30).code >= 0
    assert box.exec("echo again", user="user", timeout_s=30).output == "again\n", "new namespaces"
    assert box.exec(SERVER, user="root", timeout_s=30).code == 0
    assert box.exec(IS_UP, user="root", timeout_s=30).code == 1, 'also if the episode is "root"'


@real
@bubblewrap_works
@pytest.mark.parametrize("user", ["user", "root"])
def test_an_episode_cannot_read_the_replicas_variables(
    tmp_path: Path, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the box's first process had them in /proc/1/environ, also the keys of the bucket and of the Hub."""
    monkeypatch.setenv("BUCKET_KEY", "a-secret")
    box = LocalBoxes(tmp_path / "boxes").start(OWNER, BoxRecipe(), timeout_s=1)
    ran = box.exec("cat /proc/[0-9]*/environ | tr '\\0' '\\n'; env", user=user, timeout_s=30)
    assert "PATH=" in ran.output and "BUCKET_KEY" not in ran.output


@real
@pytest.mark.parametrize("wrap", [namespaces, pytest.param(local.bubblewrap, marks=bubblewrap_works)])
def test_a_command_runs_though_the_boxs_processes_end_before_it_enters(
    tmp_path: Path, wrap: local.Wrap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the episode read `nsenter: cannot open /proc/8717/ns/cgroup`, if its last command had killed them all."""
    box = LocalBoxes(tmp_path / "boxes", wrap=wrap).start(OWNER, BoxRecipe(), timeout_s=1)
    assert box.exec("true", user="user", timeout_s=30).code == 0
    words, ends = kept.KeptNamespaces.words, iter([True])

    def words_of_the_past(self: kept.KeptNamespaces) -> list[str]:
        found = words(self)
        if next(ends, False):
            self.close()
        return found

    monkeypatch.setattr(kept.KeptNamespaces, "words", words_of_the_past)
    assert box.exec("echo once >>log; cat log; pwd", user="user", timeout_s=30) == Ran(0, "once\n/app\n")
    assert next(ends, None) is None, "the box's processes have ended meanwhile"


@real
@pytest.mark.parametrize("wrap", [namespaces, pytest.param(local.bubblewrap, marks=bubblewrap_works)])
@pytest.mark.parametrize("user", ["user", "root"])
def test_an_episode_may_move_and_make_its_working_folder(tmp_path: Path, wrap: local.Wrap, user: str) -> None:
    """Before: in a local box no later command ran, not even the verifier; elsewhere they run in another folder."""
    boxes = LocalBoxes(tmp_path / "boxes", wrap=wrap)
    box = boxes.start(OWNER, BoxRecipe(folder="/app/repo"), timeout_s=1)
    assert box.exec("mv /app/repo /app/old", user=user, timeout_s=30) == Ran(0, "")
    assert box.exec("mkdir /app/repo; pwd", user=user, timeout_s=30) == Ran(0, "/\n")
    assert box.exec("pwd; chmod 0 /app", user=user, timeout_s=30) == Ran(0, "/app/repo\n")
    assert box.exec("chmod 700 /app; ls /app", user=user, timeout_s=30) == Ran(0, "old\nrepo\n")


@real
def test_a_late_command_of_the_episode_does_not_end_the_verifier(boxes: LocalBoxes) -> None:
    box: Any = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    box.exec("true", user="user", timeout_s=30)
    with ThreadPoolExecutor(1) as pool:
        verifier = pool.submit(box.exec, "touch begun; sleep 1; echo whole", user="root", timeout_s=30)
        until = time.monotonic() + 20
        while not (box._home / "root/app/begun").exists():
            assert time.monotonic() < until
        assert box.exec("echo late", user="user", timeout_s=30).output == "late\n"
        assert verifier.result().output == "whole\n"


@real
def test_a_full_disk_leaves_each_command_its_own_namespaces(boxes: LocalBoxes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    box = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    monkeypatch.setattr(Path, "write_text", full)
    assert box.exec(SERVER, user="user", timeout_s=30).output == "started\n"
    assert box.exec(IS_UP, user="user", timeout_s=30).code == 1


def full_for(monkeypatch: pytest.MonkeyPatch, name: str, times: int, part: str = "", code: int = errno.ENOSPC) -> None:
    """Let the first `times` calls of this method of Path fail, for paths with `part`."""
    left, original = [times], getattr(Path, name)

    def write(self: Path, data: Any) -> int:
        if part in str(self) and left[0] > 0:
            left[0] -= 1
            raise OSError(code, os.strerror(code), str(self))
        return original(self, data)

    monkeypatch.setattr(Path, name, write)


def test_a_full_disk_gives_no_box_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = LocalBoxes(tmp_path / "boxes", wrap=namespaces)
    full_for(monkeypatch, "write_text", 1, "box.json")
    with pytest.raises(ProviderFailed, match=r"cannot keep a local box: .*No space left .*box\.json.*Free some space"):
        boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    assert list((tmp_path / "boxes").iterdir()) == []


@real
def test_a_box_gets_its_files_once_there_is_space_again(boxes: LocalBoxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was said that the task's Dockerfile is wrong, and the session ended."""
    full_for(monkeypatch, "write_bytes", 2)
    clock = VirtualClock()
    box = BoxStarter(boxes, clock=clock, sleep=clock.sleep, seed=0).start(OWNER, BoxRecipe(files={"/app/a": b"one"}))
    assert box.read("a") == b"one" and clock() > 1 and len(boxes.find({})) == 1
    full_for(monkeypatch, "write_bytes", 1, code=errno.EISDIR)
    with pytest.raises(InnerError, match=r"cannot take the task's files: .*Correct its Dockerfile"):
        BoxStarter(boxes, clock=clock, sleep=clock.sleep, seed=0).start(OWNER, BoxRecipe(files={"/app/a": b"one"}))


@real
def test_a_full_disk_at_the_verifiers_files_is_not_the_policys_fault(
    boxes: LocalBoxes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = _harbor(boxes, write_task(tmp_path / "task"))
    full_for(monkeypatch, "write_bytes", 1, "/tests/")
    assert env.get_reward() is None


KILLED = """import os, sys
from pathlib import Path
from inner.extras.boxes.box import BoxOwner, BoxRecipe
from inner.extras.boxes.local import LocalBoxes
from tests.support.planted_boxes import namespaces
box = LocalBoxes(Path(sys.argv[1]), wrap=namespaces).start(BoxOwner("run", "0", 1, "7"), BoxRecipe(), timeout_s=1)
box.exec(sys.argv[2], user="user", timeout_s=30)
print("up", flush=True)
os.kill(os.getpid(), 9)
"""


@real
def test_processes_of_a_box_end_with_their_replica_and_with_the_box(boxes: LocalBoxes, tmp_path: Path) -> None:
    def is_written(home: Path) -> bool:
        (home / "root" / "tmp" / "now").unlink(missing_ok=True)
        time.sleep(0.5)
        return (home / "root" / "tmp" / "now").exists()

    words = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), SERVER]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "up\n"
    (home,) = (tmp_path / "killed").glob("box-*")
    until = time.monotonic() + 10
    while is_written(home):
        assert time.monotonic() < until
    box: Any = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    box.exec(SERVER, user="user", timeout_s=30)
    kept = box._kept
    assert is_written(box._home)
    (found,) = LocalBoxes(tmp_path / "boxes", wrap=namespaces).find({"run": "run"})  # as `diloco stop`
    found.stop()
    assert kept._process.wait(10)
    while kept.is_alive:
        assert time.monotonic() < until + 30
    with pytest.raises(BoxGone):
        box.exec("true", user="user", timeout_s=30)


@real
def test_where_namespaces_cannot_be_entered_each_command_has_its_own(
    boxes: LocalBoxes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nsenter").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "nsenter").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    box = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    assert box.exec("pwd; touch here", user="user", timeout_s=30).output == "/app\n"
    assert box.exec("ls", user="user", timeout_s=30).output == "here\n"


@pytest.mark.slow
@real
def test_much_output_is_cut_in_the_box(boxes: LocalBoxes) -> None:
    box = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    ran = box.exec("echo first; head -c 200000000 /dev/zero | tr '\\0' x; echo last", user="user", timeout_s=120)
    assert ran.output.startswith("first\n") and ran.output.endswith("last\n") and CUT in ran.output
    assert len(ran.output) < 8300


def test_output_is_text_whatever_its_bytes_are() -> None:
    assert read_output(b"\xff") == "\ufffd"
    assert read_output(b"x" * 8192) == "x" * 8192
    assert read_output("\ufffd" * 8192) == "\ufffd" * 8192
    assert read_output(b"x" * 100_000) == CUT.join(["x" * HALF_OUTPUT] * 2), "from a box that does not cut"


@real
@pytest.mark.parametrize("length", [4095, 4096, 4097, 8191, 8192])
def test_output_of_two_halves_is_whole(boxes: LocalBoxes, length: int) -> None:
    box = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    ran = box.exec(f"head -c {length} /dev/zero | tr '\\0' a; exit 3", user="user", timeout_s=30)
    assert ran == Ran(3, "a" * length)


@real
def test_output_of_a_byte_more_is_marked_and_no_byte_becomes_another(boxes: LocalBoxes) -> None:
    box = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    ran = box.exec(
        "head -c 4096 /dev/zero; printf x; head -c 4096 /dev/zero | tr '\\0' '\\n'", user="user", timeout_s=30
    )
    assert ran.output == "\0" * HALF_OUTPUT + CUT + "\n" * HALF_OUTPUT


# bash under load: the time limit passes between the byte and the return, and the variable of a NUL is empty
LATE_READ = """read() {
  builtin read "$@"; got=$?; local IFS=" "
  case " $* " in *" -u 4 "*|*" -t 0 "*) return $got;; *" -t "*) [ "$byte" ] || return 142;; esac
  return $got
}
"""


def test_a_read_that_reaches_its_limit_loses_no_byte() -> None:
    """On a busy machine, 6 of 40 outputs had lost a NUL."""
    words = wrapped_command("printf '\\0a'; sleep .1; printf '\\0'", 30)
    words[2] = LATE_READ + words[2]
    ran = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert (ran.returncode, ran.stdout) == (0, b"\0a\0")


@real
def test_a_link_leads_out_of_no_box(boxes: LocalBoxes) -> None:
    box = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    box.exec("ln -s /etc/passwd p; ln -s /etc e", user="user", timeout_s=30)
    for path in ("p", "e/passwd", "../../../etc/passwd"):
        with pytest.raises(FileNotFoundError):
            box.read(path)


def test_late_boxes_go_with_the_next_start(tmp_path: Path) -> None:
    now = 1000.0
    boxes = LocalBoxes(tmp_path, wrap=namespaces, clock=lambda: now)
    boxes.start(OWNER, BoxRecipe(ttl_s=10), timeout_s=1)
    now = 1011.0
    boxes.start(BoxOwner("run", "0", 1, "8"), BoxRecipe(), timeout_s=1)
    assert len(boxes.find({"run": "run"})) == 1


def test_a_folder_whose_start_was_killed_goes_after_an_hour(tmp_path: Path) -> None:
    boxes = LocalBoxes(tmp_path, wrap=namespaces)
    old, new = tmp_path / "box-old", tmp_path / "box-new"
    for home in (old, new):
        (home / "root/app").mkdir(parents=True)
    os.utime(old, (time.time() - 3601,) * 2)
    boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    assert not old.exists() and new.exists()


def test_a_box_that_cannot_be_deleted_whole_is_still_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode takes its own folders' permissions away, and `rmtree` fails there: root's, too, in this test."""

    def refusing(path: Path, ignore_errors: bool) -> None:
        if not any(at.is_dir() and at.stat().st_mode & 0o700 != 0o700 for at in [path, *path.rglob("*")]):
            remove(path, ignore_errors=ignore_errors)

    remove = shutil.rmtree
    boxes = LocalBoxes(tmp_path, wrap=namespaces)
    box = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    (home,) = tmp_path.iterdir()
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir(mode=0o750)
    (home / "root/app/deep/er").mkdir(parents=True)
    (home / "root/app/link").symlink_to(outside)
    monkeypatch.setattr(local.shutil, "rmtree", lambda path, ignore_errors: None)
    box.stop()
    assert len(boxes.find(OWNER.labels)) == 1, "a later sweep stops it"
    monkeypatch.setattr(local.shutil, "rmtree", refusing)
    for path in ("deep/er", "deep"):
        (home / "root/app" / path).chmod(0)
    box.stop()
    assert not home.exists() and boxes.find({}) == []
    assert outside.stat().st_mode & 0o777 == 0o750, "a link leads out of no box"


def test_bad_providers_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InnerError, match=r"no provider of boxes 'nowhere'\. Name"):
        open_provider("nowhere")
    monkeypatch.setattr(local.shutil, "which", lambda name: None)
    with pytest.raises(SandboxMissing, match="local boxes need `bwrap`"):
        open_provider("local", root=tmp_path)


# -------------------------------------------------------------------- Harbor's folders

TEST_SH = '[ "$(cat /app/answer 2>/dev/null)" = 42 ] && R=1 || R=0; echo $R > /logs/verifier/reward.txt\n'


def write_task(
    folder: Path,
    *,
    test: str | None = TEST_SH,
    docker: str = "FROM x\nCOPY repo /app\nWORKDIR /app\n",
    toml: str = "[verifier]\ntimeout_sec = 30.0\n[agent]\ntimeout_sec = 60.0\n",
    words: bytes = b"Write 42 into /app/answer.\n",
    compose: str = "",
) -> Path:
    (folder / "environment/repo").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_bytes(words)
    (folder / "environment/Dockerfile").write_text(docker, "utf-8", "surrogateescape")
    (folder / "environment/repo/given.txt").write_text("given")
    if test is not None:
        (folder / "tests/test.sh").write_text(test, newline="")
    if compose:
        (folder / "environment/docker-compose.yaml").write_text(compose)
    return folder


def _harbor(boxes: LocalBoxes, folder: Path) -> HarborEnvironment:
    env = harbor_environment(BoxStarter(boxes))()
    (row,) = make_rows(TaskSpec(f"harbor:{folder}", 1, 0))
    env.reset(**row)
    return env


@real
def test_a_task_is_solved_with_the_tools(boxes: LocalBoxes, tmp_path: Path) -> None:
    env = _harbor(boxes, write_task(tmp_path / "task"))
    assert env.bash("pwd; cat given.txt; ls /tests") == "/app\ngiven"
    assert env.bash("exit 5") == "\n[exit code 5]"
    assert env.write("answer", "42") == "answer: 2 characters"
    assert env.read("answer") == "42"
    assert "[exit code 1]" in env.read("absent")
    env.submit()
    assert env.get_reward() == 1.0 and env.get_reward() == 1.0
    assert boxes.find({}) == []


@real
def test_a_wrong_answer_is_a_zero_that_counts(boxes: LocalBoxes, tmp_path: Path) -> None:
    env = _harbor(boxes, write_task(tmp_path / "task"))
    env.write("answer", "41")
    assert env.get_reward() == 0.0


@real
def test_a_verifier_that_the_episode_broke_is_no_none(boxes: LocalBoxes, tmp_path: Path) -> None:
    needs = "cp /app/given.txt /tmp/x && echo 1 > /logs/verifier/reward.txt\n"
    env = _harbor(boxes, write_task(tmp_path / "task", test=needs))
    env.bash("rm -rf /app/*")
    assert isinstance(env.get_reward(), AtMostWorst)
    assert boxes.find({}) == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1\n", 1.0), ('{"reward": 0.5}', 0.5), ("-3e2", -300.0), ("", None), ("NaN", None), ("Infinity", None),
        ("1" * 400, None), ("1" * 5000, None), ('{"reward": ' + "9" * 400 + "}", None), ("1e400", None), ("1e30", None),
        ("[" * 100_000, None), ('{"reward": ' + "[" * 4000, None), ("[1]", None), ("null", None),
        ('{"other": 1}', 1.0), ('{"other": 1, "more": 2}', None), ('{"other": 1, "reward": 2}', 2.0), ("{}", None),
        ('{"other": {"reward": 1}}', None), (".5\n", 0.5), ("1.", 1.0), ("+1", 1.0), ("01", 1.0), ("nan", None),
        ("inf", None), ("1\n0\n", None), ("0,5", None),
    ],
    ids=lambda x: str(x)[:20],
)  # fmt: skip
def test_what_a_verifier_writes_is_a_number_or_none(text: str, number: float | None) -> None:
    assert read_number(text) == number


@pytest.mark.quick(3)
@real
@pytest.mark.parametrize(
    ("written", "reward"),
    [
        ("head -c 30000000 /dev/zero | tr '\\0' 1 > /logs/verifier/reward.txt", None),
        ("(echo 1; head -c 30000000 /dev/zero | tr '\\0' ' ') > /logs/verifier/reward.txt", 1.0),
        ("ln -s /dev/zero /logs/verifier/reward.txt; echo '{\"reward\": 2}' > /logs/verifier/reward.json", 2.0),
        ("mkfifo /logs/verifier/reward.txt", None),
        ("cd /logs/verifier; echo 1 > reward.txt; echo '{\"reward\": 2}' > reward.json", 2.0),
        ("cd /logs/verifier; echo 1 > reward.txt; echo '{\"speed\": 2, \"size\": 3}' > reward.json", 1.0),
    ],
    ids=["digits", "spaces", "device", "pipe", "both", "other"],
)  # fmt: skip
def test_a_reward_file_is_read_up_to_a_bound(
    boxes: LocalBoxes, tmp_path: Path, written: str, reward: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[int]()
    monkeypatch.setattr(episode, "read_number", lambda text: (read.append(len(text)), read_number(text))[1])
    (row,) = make_rows(TaskSpec(f"harbor:{write_task(tmp_path / 'task', test=written)}", 1, 0))
    task = load_harbor(row["harbor"])
    assert episode.verify(boxes.start(OWNER, BoxRecipe(), timeout_s=1), task) == reward
    assert max(read, default=0) <= episode.MOST_REWARD


@real
def test_what_the_episode_puts_into_the_verifiers_place_is_removed(boxes: LocalBoxes, tmp_path: Path) -> None:
    env = _harbor(boxes, write_task(tmp_path / "task"))
    env.bash("mkfifo /tests/test.sh; mkdir -p /logs/verifier; mkfifo /logs/verifier/reward.txt; echo 42 > answer")
    assert env.get_reward() == 1.0


bubblewrapped = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
PLANT = "echo 1 > /{0}/reward.txt && chmod 555 /{0}"


@bubblewrapped
@pytest.mark.parametrize(
    "plants",
    [
        f"mkdir /logs/verifier && {PLANT.format('logs/verifier')}",
        f"mkdir -p /logs/verifier/a/b && {PLANT.format('logs/verifier')} && chmod 0 /logs/verifier/a",
        f"mkdir v && ln -s /app/v /logs/verifier && {PLANT.format('app/v')}",
        f"ln -s /tests /logs/verifier && {PLANT.format('tests')}",
        "touch /logs/verifier && chmod 555 /logs",
    ],
)
def test_an_episode_writes_no_reward_of_its_own(tmp_path: Path, plants: str) -> None:
    env = _harbor(LocalBoxes(tmp_path / "boxes"), write_task(tmp_path / "task"))
    assert env.bash(plants) == ""
    assert env.get_reward() == 0.0


@bubblewrapped
def test_the_verifiers_folder_has_nothing_of_the_episode(tmp_path: Path) -> None:
    test = "[ -z \"$(ls -A /tests | grep -v '^test.sh$')\" ] && echo 1 > /logs/verifier/reward.txt\n"
    env = _harbor(LocalBoxes(tmp_path / "boxes"), write_task(tmp_path / "task", test=test))
    assert env.bash("cd /tests && mkdir d && touch conftest.py .x ..y d/z && chmod 555 d .") == ""
    assert env.get_reward() == 1.0


def test_a_place_that_cannot_be_cleared_gives_no_reward(boxes: LocalBoxes) -> None:
    """For example, because the episode's folders are so many that `rm` reaches its time limit."""

    class Planted:
        def exec(self, command: str, *, user: str, timeout_s: float) -> Ran:
            return Ran(124, "") if "rm -rf" in command else Ran(0, "1")

        def write(self, path: str, data: bytes) -> None: ...

    assert episode.verify(Planted(), load_harbor(TASK)) is None  # pyright: ignore[reportArgumentType]


@real
def test_a_command_that_no_program_can_have_is_an_error_and_no_verdict(boxes: LocalBoxes, tmp_path: Path) -> None:
    env = _harbor(boxes, write_task(tmp_path / "task"))
    with pytest.raises(ValueError, match="null byte"):
        env.bash("echo a\0b")
    for box in boxes.find({}):
        box.stop()
    assert env.bash("echo hi") == GONE
    assert env.get_reward() is None, "the provider lost it"


@pytest.mark.parametrize("docker", ["WORKDIR /usr/src/app", "COPY repo/given.txt /usr/local/bin/x", "WORKDIR /dev/x"])
def test_a_local_box_keeps_this_machines_programs(boxes: LocalBoxes, tmp_path: Path, docker: str) -> None:
    (task,) = read_tasks(write_task(tmp_path / "task", docker=f"FROM x\n{docker}\n"))
    with pytest.raises(InnerError, match=r"a local box has this machine's /(usr|dev), so it cannot have /(usr|dev)/"):
        BoxStarter(boxes).start(OWNER, BoxRecipe(files=unpack(task.files), folder=task.folder))


@bubblewrapped
def test_a_task_may_have_files_in_etc(tmp_path: Path) -> None:
    docker = "FROM x\nCOPY repo/given.txt /etc/app/x\nCOPY repo /app\n"
    env = _harbor(LocalBoxes(tmp_path / "boxes"), write_task(tmp_path / "task", docker=docker))
    assert env.bash("cat /etc/app/x") == "given"
    there = env.bash("ls -A /etc/alternatives 2>/dev/null || true").split()
    assert set(there) == {path.name for path in Path("/etc/alternatives").glob("*")}


@real
def test_what_is_no_file_is_neither_read_nor_written(boxes: LocalBoxes) -> None:
    box = boxes.start(OWNER, BoxRecipe(), timeout_s=1)
    box.exec("mkfifo pipe", user="user", timeout_s=30)
    box.exec("ln -s round round", user="user", timeout_s=30)  # before: a RuntimeError, in Python 3.11 and 3.12
    for name in ("pipe", "round", "round/below", "/"):
        with pytest.raises(FileNotFoundError):
            box.read(name)
        with pytest.raises(FileExistsError):
            box.write(name, b"")


@real
def test_a_verifier_that_never_gives_a_number_is_a_none(boxes: LocalBoxes, tmp_path: Path) -> None:
    env = _harbor(boxes, write_task(tmp_path / "task", test="echo broken > /logs/verifier/reward.txt\n"))
    assert env.get_reward() is None


@pytest.mark.slow
@real
def test_the_log_has_the_words_of_a_verifier_without_a_number_once(boxes: LocalBoxes, tmp_path: Path) -> None:
    """Three silent batches ended the session, and no line of its log said what the verifier had printed."""
    said = list[tuple[str, str]]()
    Harbor = harbor_environment(BoxStarter(boxes))
    Harbor._host = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        rented=lambda *_: None, emit=lambda event, text, **_: said.append((event, text))
    )
    test = "echo half > /logs/verifier/reward.txt; echo $RANDOM; no-such-program\n"
    (row,) = make_rows(TaskSpec(f"harbor:{write_task(tmp_path / 'task', test=test)}", 1, 0))
    for _ in range(2):
        env = Harbor()
        env.reset(**row)
        assert env.get_reward() is None
    ((_, text),) = [one for one in said if one[0] == "reward_failed"]
    assert text.startswith("the verifier of the Harbor task task gives no number. It left /logs/verifier/reward.txt")
    assert "'half\\n', exit code 127" in text and "no-such-program: command not found" in text


@bubblewrapped
def test_programs_and_variables_of_a_task_reach_the_box(tmp_path: Path) -> None:
    """COPY keeps the bit by which a file is a program, and Harbor gives these variables to commands."""
    toml = '[environment]\nworkdir = "/work"\nenv = {A = "1 \'2", B = ""}\n[verifier.env]\nC = "c"\n'
    test = '/tests/help.sh && [ "$A$B$C" = "1 \'2c" ] && echo .5 > /logs/verifier/reward.txt\n'
    folder = write_task(tmp_path / "task", test=test, toml=toml)
    for path in ("tests/help.sh", "environment/repo/run"):
        (folder / path).write_text("#!/bin/bash\nexit 0\n")
        (folder / path).chmod(0o755)
    env = _harbor(LocalBoxes(tmp_path / "boxes"), folder)
    assert env.bash('/app/run && pwd && echo "$A${C-none}" && [ ! -x /app/given.txt ]') == "/work\n1 '2none\n"
    assert env.get_reward() == 0.5


def test_a_row_has_no_empty_fields(tmp_path: Path) -> None:
    (task,) = read_tasks(write_task(tmp_path / "task"))
    before = {"agent_s", "base", "files", "folder", "image", "instruction", "name", "tests", "verifier_s"}
    assert json.loads(task.dump()).keys() == before and load_harbor(task.dump()) == task
    (tmp_path / "task/tests/test.sh").chmod(0o755)
    (task,) = read_tasks(tmp_path / "task")
    assert json.loads(task.dump())["programs"] == ["/tests/test.sh"] and load_harbor(task.dump()) == task


SUM = "def add(a, b):\n    return {}\n\ndef one():\n    return 1\n"


@bubblewrapped
@pytest.mark.parametrize(("body", "expected"), [("a + b", 1.0), ("7", 0.0), ("None", 0.0)])
def test_feature_deletions_folders_run_in_bubblewrap(tmp_path: Path, body: str, expected: float) -> None:
    tests = [
        HiddenTest(name="add", run="from calc import add\nresult = add(2, 3)", expect=5),
        HiddenTest(name="one", run="from calc import one\nresult = one()", expect=1),
    ]
    files = {"calc.py": SUM.format("None")}
    task = DeletionTask(
        name="add", instruction="Write add.", files=files, solution={}, tests=tests, fail_to_pass=["add"]
    )
    write_harbor(task, tmp_path / "task")
    assert read_tasks(tmp_path / "task")[0].offline
    env = _harbor(LocalBoxes(tmp_path / "boxes"), tmp_path / "task")
    assert env.bash("id -u; ls; echo no > /usr/x") == (
        "1000\ncalc.py\nbash: line 1: /usr/x: Read-only file system\n\n[exit code 1]"
    )
    env.write("calc.py", SUM.format(body))
    assert env.get_reward() == expected


APART = '[verifier]\nenvironment_mode = "separate"\n'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": None}, "has no verifier: tests/test.sh is missing"),
        ({"docker": "FROM x\nCOPY absent /app\n"}, "has no files"),
        ({"docker": "FROM x\nCOPY repo /app # all\n"}, "has no files"),
        ({"docker": "FROM x\n# \udcff\n"}, "cannot be read: 'utf-8' codec"),
        (
            {"docker": "FROM x\nWORKDIR /\n"},
            r"working folder that is '/' .* task.toml: workdir of \[environment\]",
        ),
        ({"docker": "FROM x\nRUN a\nWORKDIR $HOME\n"}, "or contains a variable. A box needs another"),
        ({"docker": "FROM x\nCOPY ../instruction.md /app/\n"}, "outside this folder"),
        ({"toml": '[verifier]\ntimeout_sec = "10 min"\n'}, r"\[verifier\] timeout_sec = '10 min' must be a number"),
        ({"toml": "[agent]\ntimeout_sec = inf\n"}, "must be a number between 0 and 1e9"),
        ({"toml": "agent = 3\n"}, "agent = 3 is not a table"),
        ({"toml": "[environment]\ndocker_image = 5\n"}, "docker_image = 5 is not the name of an image"),
        ({"toml": '[environment]\nworkdir = "app"\n'}, "workdir = 'app' must be an absolute path below /"),
        ({"toml": '[environment]\nworkdir = "/.."\n'}, r"workdir = '/\.\.' must be an absolute path below /"),
        ({"toml": '[environment]\nworkdir = "/a\\u0000"\n'}, r"workdir = '/a\\x00' must be an absolute path"),
        ({"toml": "[verifier]\nenv = 3\n"}, "env = 3 is not a table"),
        ({"toml": "[verifier.env]\nA = 3\n"}, r"\[verifier.env\] A = 3 must be a text"),
        ({"toml": '[environment.env]\n"A;x" = "3"\n'}, "must be a text; write letters"),
        ({"toml": '[verifier.env]\nKEY = "${KEY}"\n'}, r"KEY = '\$\{KEY\}' is of the machine that starts Harbor"),
        ({"toml": '[[steps]]\nname = "one"\n', "test": None}, "steps asks for several instructions .* Leave the task"),
        ({"toml": '[environment]\nos = "windows"\n'}, r"\[environment\] os asks for another operating system"),
        ({"toml": '[[environment.mcp_servers]]\nname = "a"\n'}, "mcp_servers asks for tools of MCP servers"),
        ({"toml": '[environment]\nallowed_hosts = ["a.b"]\n'}, "allowed_hosts asks for a network with a few hosts"),
        ({"toml": '[environment]\nnetwork_mode = "allowlist"\n'}, "network_mode = 'allowlist' is not possible"),
        ({"toml": '[verifier]\nenvironment_mode = "both"\n'}, "environment_mode = 'both' is not known"),
        ({"toml": '[verifier.environment]\nos = "windows"\n'}, r"\[verifier.environment\] os asks for another"),
        ({"toml": "[verifier]\nenvironment = 3\n"}, "verifier.environment = 3 is not a table"),
        ({"toml": 'artifacts = ["out"]\n' + APART}, "the artifact 'out' must be an absolute path below /"),
        ({"toml": 'artifacts = ["/tests/a"]\n' + APART}, "must be an absolute path below /, and not in /tests"),
        ({"toml": 'artifacts = ["/x/../logs/verifier"]\n' + APART}, "and not in /tests or /logs/verifier"),
        ({"toml": "artifacts = [3]\n" + APART}, "the artifact 3 must be a path, or a table of source and exclude"),
        ({"toml": 'artifacts = [{source = "/a", exclude = "b"}]\n' + APART}, "exclude, a list of texts"),
        ({"toml": 'artifacts = [{source = "/a", service = "db"}]\n' + APART}, "is of a second container"),
        ({"toml": '[[verifier.collect]]\ncommand = "x"\n'}, "collect asks for commands between"),
        ({"toml": '[agent]\nnetwork_mode = "no-network"\n'}, r"\[agent\] network_mode = 'no-network' is not possible"),
        (
            {"toml": '[environment]\nallow_internet = false\n[verifier]\nnetwork_mode = "public"\n'},
            r"\[verifier\] netw",
        ),
        ({"words": b"\xff"}, "cannot be read: 'utf-8' codec"),
        ({"test": "echo 1\r\n"}, r"test.sh has the line ends of Windows.*sed -i 's/\\r\$//' "),
        ({"compose": "services: {}\n"}, "has docker-compose.yaml, and a box is one container.*task_options.image"),
    ],
)
def test_bad_task_folders_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InnerError, match=message):
        read_tasks(write_task(tmp_path / "task", **change))


@pytest.mark.parametrize("folder", ["tests", "environment/repo"])
def test_a_name_that_is_no_text_is_refused(tmp_path: Path, folder: str) -> None:
    """Before: no remote box took the file, and the verifier's made 0 of each reward, as if the policy broke its box."""
    task = write_task(tmp_path / "task", docker="FROM x\nCOPY repo /app/\n")
    (task / folder / os.fsdecode(b"\xff.txt")).write_text("")
    with pytest.raises(InnerError, match=r"the name '/(tests|app)/\\udcff.txt' is not UTF-8, .* Rename the file"):
        read_tasks(task)


@pytest.mark.parametrize(
    ("toml", "offline"),
    [
        ("", False),
        ("[environment]\nallow_internet = true\n", False),
        ("[environment]\nallow_internet = false\n", True),
        ('[environment]\nallow_internet = false\nnetwork_mode = "public"\n', False),
        ('[environment]\nnetwork_mode = "no-network"\n[agent]\nnetwork_mode = "no-network"\n', True),
        (
            'steps = []\n[environment]\nos = "linux"\nallowed_hosts = []\n[verifier]\nenvironment_mode = "shared"\n',
            False,
        ),
    ],
)
def test_a_task_may_ask_for_a_box_without_a_network(tmp_path: Path, toml: str, offline: bool) -> None:
    """The setting was ignored, so a model could download the answer; Feature Deletion's own folders have it."""
    (task,) = read_tasks(write_task(tmp_path / "task", toml=toml))
    assert task.offline == offline == load_harbor(task.dump()).offline
    assert episode._recipe(task).offline == offline and ("offline" in json.loads(task.dump())) == offline


def test_an_image_for_all_tasks_stands_for_several_containers(tmp_path: Path) -> None:
    assert read_tasks(write_task(tmp_path / "task", compose="services: {}\n"), {"image": "all:1"})[0].image == "all:1"


def test_links_within_the_folder_are_packed_and_others_are_named(tmp_path: Path) -> None:
    """They were left out of the box without a word."""
    folder = write_task(tmp_path / "task")
    repo = folder / "environment/repo"
    (folder / "tests/test.sh").rename(folder / "tests/real.sh")
    (folder / "tests/test.sh").symlink_to("real.sh")
    (folder / "tests/words").symlink_to(folder / "instruction.md")
    (repo / "sub/deep").mkdir(parents=True)
    (repo / "sub/deep/x").write_text("x")
    for name, target in {
        "in.txt": "../Dockerfile", "sub/again": "deep", "out.txt": "../../task.toml", "gone": "nowhere", "round": ".",
        "sub/deep/up": "..", "tests": "../../tests", "up": "..", "itself": "itself", "sub/b": "../sub/c", "sub/c": "b",
    }.items():  # fmt: skip
        (repo / name).symlink_to(target)
    (task,) = read_tasks(folder)
    assert task.tests["/tests/test.sh"] == task.tests["/tests/real.sh"]
    assert sorted(task.files) == [f"/app/{name}" for name in ("given.txt", "in.txt", "sub/again/x", "sub/deep/x")]
    assert [str(path.relative_to(folder)) for path in task.left_out] == [
        *(f"environment/repo/{n}" for n in ("gone", "itself", "out.txt", "round", "sub/again/up", "sub/b", "sub/c")),
        *(f"environment/repo/{n}" for n in ("sub/deep/up", "tests", "up")),
        "tests/words",
    ]
    assert "left_out" not in task.dump(), "older replicas read the row, too"


def test_a_copied_link_in_a_circle_is_refused(tmp_path: Path) -> None:
    """A link in a circle is also among those above. Before: "RuntimeError: Symlink loop", in Python 3.11 and 3.12."""
    folder = write_task(tmp_path / "task", docker="FROM x\nCOPY round /app/\n")
    (folder / "environment/round").symlink_to("round")
    with pytest.raises(InnerError, match=r"round has no files, but links that lead out of .*, or nowhere"):
        read_tasks(folder)


def test_links_to_folders_do_not_multiply(tmp_path: Path) -> None:
    """Two links in each of 12 folders to the next one were 4,083 files."""
    folder = write_task(tmp_path / "task")
    repo = folder / "environment/repo"
    for i in range(12):
        (repo / f"p{i}").mkdir()
        (repo / f"p{i}/f").write_text("x")
        for name in "ab" if i < 11 else "":
            (repo / f"p{i}/{name}").symlink_to(f"../p{i + 1}")
    (task,) = read_tasks(folder)
    assert len(task.files) == 1 + 12 + 22 and len(task.left_out) == 2 * 20


def test_folders_of_links_that_lead_out_are_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task")
    (folder / "tests/real.sh").write_text("")
    (folder / "tests/test.sh").unlink()
    (folder / "tests/test.sh").symlink_to(folder / "instruction.md")
    with pytest.raises(InnerError, match=r"has no verifier: tests/test\.sh is a link out of tests/"):
        read_tasks(folder)
    (folder / "tests/real.sh").unlink()  # before: "tests has no files"
    with pytest.raises(InnerError, match=r"tests has no files, but links that lead out of .*tests/test\.sh\."):
        read_tasks(folder)
    (folder / "environment/repo/given.txt").unlink()
    (folder / "environment/repo/out").symlink_to(folder / "tests")
    with pytest.raises(
        InnerError, match=r"repo has no files, but links that lead out of .*environment, .*: .*repo/out\."
    ):
        read_tasks(folder)


def test_files_and_links_of_more_than_16_mib_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inner.tasks.harbor_files.MOST_BYTES", 1 << 20)
    folder = write_task(tmp_path / "task")
    (folder / "environment/repo/big").write_bytes(bytes(3 << 18))
    assert read_tasks(folder)
    (folder / "environment/repo/twice").symlink_to("big")
    with pytest.raises(InnerError, match=r"repo has more than 1 MiB\. Build an image"):
        read_tasks(folder)


@pytest.mark.parametrize(
    ("docker", "work", "files"),
    [
        ("COPY repo/given.txt .", "/app", ["/app/given.txt"]),
        ("WORKDIR src\nCOPY repo/given.txt /data/\nCOPY repo .", "/app/src", ["/app/src/given.txt", "/data/given.txt"]),
        ("WORKDIR /w/../src\ncopy repo/given.txt named.txt", "/src", ["/src/named.txt"]),
        ("COPY repo / \nCOPY repo/*.txt repo/given.txt /many", "/app", ["/given.txt", "/many/given.txt"]),
        ("COPY repo /app\nCOPY repo/given.txt /app", "/app", ["/app/given.txt"]),
        ("COPY . /w", "/app", ["/w/Dockerfile", "/w/repo/given.txt"]),
        ("COPY ./ .", "/app", ["/app/Dockerfile", "/app/repo/given.txt"]),
        ("COPY /repo /app", "/app", ["/app/given.txt"]),
        ("COPY repo/[f-h]iven.txt /app/", "/app", ["/app/given.txt"]),
        ("COPY repo/[^a]iven.txt /app/", "/app", ["/app/given.txt"]),
    ],
)
def test_copy_and_workdir_mean_what_they_mean_to_docker(tmp_path: Path, docker: str, work: str, files: Any) -> None:
    (task,) = read_tasks(write_task(tmp_path / "task", docker=f"FROM x\n{docker}\n"))
    assert (task.folder, sorted(task.files)) == (work, files)


def test_an_image_replaces_the_dockerfile(tmp_path: Path) -> None:
    (task,) = read_tasks(write_task(tmp_path / "task", docker="FROM x\nRUN y\n").parent, {"image": "built"})
    assert task.image == "built" and task.files == {}
    assert load_harbor(task.dump()) == task
    with pytest.raises(InnerError, match="no Harbor task"):
        read_tasks(tmp_path / "task/tests")
    with pytest.raises(InnerError, match="is not a Harbor task"):
        load_harbor(json.dumps({"name": "x"}))


# -------------------------------------------------------------------- a training step

WORLD_FILE = f'''
from inner.extras.boxes.starting import BoxStarter
from inner.extras.boxes.world import harbor_environment
from tests.support.planted_boxes import PlantedBoxes, VirtualClock

clock = VirtualClock()
starter = BoxStarter(PlantedBoxes(clock, deaths=0.4, turns=1), clock=clock, sleep=clock.sleep, seed=0)
seen = []

class World(harbor_environment(starter)):
    numbers = iter(range(1000))

    def __init__(self):
        super().__init__()
        self._place = str(next(World.numbers))

    def {WORLD.right_name(0)}(self, a: int, b: int) -> str:
        """The one.

        Args:
            a: first
            b: second
        """
        return self.bash(f"answer {{(a + b) % 2}}")

    def get_reward(self):
        seen.append(super().get_reward())
        return seen[-1]
'''


def test_a_batch_with_lost_boxes_is_trained_on(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(WORLD_FILE)
    row = {"prompt": [{"role": "user", "content": "op0 3 4"}], "harbor": TASK}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    config = InnerConfig(
        model=str(small_folder()),
        data={"prompts": "rows.jsonl"},
        sampling={"environment": "world.py:World"},
        batch_size=16,
    )
    files = {"prompts": tmp_path / "rows.jsonl", "environment": tmp_path / "world.py"}
    loop: Any = build_inner(config, small_folder(), files, Seeds(data=0, noise=0))
    told, prices = list[tuple[str, dict[str, Any]]](), list[float | None]()
    emit = lambda event, text, **fields: told.append((event, fields))  # noqa: E731
    rented = lambda seconds, usd_per_hour: prices.append(usd_per_hour)  # noqa: E731
    loop.report_to(SimpleNamespace(owner=("nonce", "r01", 3), note=print, emit=emit, pause=print, rented=rented))
    before = torch.cat([p.detach().flatten() for p in loop.model.parameters()])
    stops = iter((False, True))
    loop.train(lambda: next(stops))
    after = torch.cat([p.detach().flatten() for p in loop.model.parameters()])
    world = sys.modules[type(loop.trainer.environments[0]).__module__]
    print(world.seen, loop.pop_metrics())
    assert None in world.seen and {0.0, 1.0} <= set(world.seen)
    assert world.starter.provider.alive == {}
    owners = {(box.owner.run, box.owner.slot, box.owner.generation) for box in world.starter.provider.made}
    assert owners == {("nonce", "r01", 3)}
    used = [fields for event, fields in told if event == "boxes_used"]
    assert sum(fields["boxes"] for fields in used) == world.starter.counts["started"], "fresh boxes cost, too"
    assert {fields["usd_per_hour"] for fields in used} == {world.starter.provider.price_per_hour}
    assert prices == [world.starter.provider.price_per_hour] * world.starter.counts["started"]
    assert torch.isfinite(after).all() and not torch.equal(before, after)

"""Recorded rollouts: training on them gives the bits of the run that made them, and what does not fit is refused."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inner.rollouts.recording.bundle import Bundle, RandomStates
from inner.rollouts.recording.found import _begins_as
from inner.rollouts.recording.recorded import BundlePlace, record_rollouts
from inner.rollouts.recording.unpack import restore, unpack
from inner.rollouts.rollout_states import bundle_rollouts
from inner.rollouts.sample import RolloutSample
from inner.settings.inner import InnerConfig, Seeds
from inner.train.build import build_inner
from tests.inner.test_toolworld import SMALL, small_folder
from tests.support.tables import merge_tables

torch.set_num_threads(1)


class Kept:
    """Bundles in a dictionary, as bytes.   sample: the trained loop's sample of rollouts."""

    sample: RolloutSample

    def __init__(self) -> None:
        self.bodies: dict[BundlePlace, bytes] = {}
        self.found: list[BundlePlace] = []
        self.refused: list[str] = []

    def find(self, place: BundlePlace, unfit: Callable[[Bundle], str]) -> Bundle | None:
        body = self.bodies.get(place)
        if body is None:
            return None
        bundle = unpack(body)
        if why := unfit(bundle):
            self.refused.append(why)
            return None
        self.found.append(place)
        return bundle

    def put(self, place: BundlePlace, made: Bundle, unfit: Callable[[Bundle], str]) -> Bundle:
        self.bodies[place] = made.pack()
        return made


class Killed(Exception): ...


def trained(
    steps: int, places: Kept | None, noise: int = 0, dies_at: int | None = None, **settings: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the parameters after `steps` inner steps, and the metrics.   dies_at: a generation that never ends."""
    loop: Any = build_inner(
        InnerConfig(**merge_tables(SMALL, settings)), small_folder(), {}, Seeds(data=0, noise=noise)
    )
    if places is not None:
        record_rollouts(loop.trainer, places)
        places.sample = loop._rollouts
    if dies_at is not None:
        generate = loop.trainer._generate

        def dying(prompts: Any) -> Any:
            out = generate(prompts)
            if loop.trainer._step >= dies_at:
                raise Killed
            return out

        loop.trainer._generate = dying
    left = iter([False] * (steps - 1) + [True])
    with suppress(Killed):
        loop.train(lambda: next(left))
    parameters = torch.cat([p.detach().flatten() for p in loop.model.parameters()])
    return parameters, {name: value for name, value in loop.pop_metrics().items() if "time" not in name}


KINDS: list[Any] = [
    {},
    {"sdpo": {"weight": 0.1}},
    {"grpo": {"steps_per_generation": 2, "num_iterations": 2}, "sampling": {"tool_workers": 4}},
    pytest.param({"grpo": {"objective": "dapo"}}, marks=pytest.mark.slow),
    pytest.param({"trl": {"beta": 0.1}}, marks=pytest.mark.slow),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("settings", KINDS, ids=lambda s: "-".join(s) or "plain")
def test_recording_changes_no_bit_and_a_replay_gives_them_again(settings: dict[str, Any]) -> None:
    kept = Kept()
    alone, numbers = trained(4, None, **settings)
    recorded, the_same = trained(4, kept, **settings)
    assert torch.equal(alone, recorded) and numbers == the_same and kept.bodies and not kept.found
    again, also = trained(4, kept, noise=9, **settings)
    assert torch.equal(alone, again) and kept.found == list(kept.bodies)
    assert also == pytest.approx(numbers)


@pytest.mark.quick(1)
@pytest.mark.parametrize("generation", [1, 3])
def test_a_replacement_goes_on_as_the_killed_process_would_have(generation: int) -> None:
    """The generation in which it was killed is made again with the random numbers that it had."""
    kept = Kept()
    whole, _ = trained(5, None)
    trained(5, kept, dies_at=generation)
    assert len(kept.bodies) == generation
    again, _ = trained(5, kept, noise=77)
    assert torch.equal(whole, again) and len(kept.found) == generation


def test_rollouts_that_come_later_than_another_process_s_leave_no_trace() -> None:
    """Their rewards and lengths are in no metric, and their texts in no log, since they are not trained on."""
    kept, late = Kept(), Kept()
    first, numbers = trained(2, kept)
    late.put = lambda place, made, unfit: unpack(kept.bodies[place])
    second, also = trained(2, late, noise=9)
    assert torch.equal(first, second) and also == pytest.approx(numbers)
    logged, of_late = (sorted(map(json.dumps, places.sample.take(64))) for places in (kept, late))
    assert logged == of_late, "before: the discarded ones were logged beside them"


def a_bundle() -> tuple[Bundle, Kept]:
    kept = Kept()
    kept.bodies.update(recorded_once())
    return unpack(kept.bodies[BundlePlace(0, 0, 0)]), kept


@cache
def recorded_once() -> dict[BundlePlace, bytes]:
    kept = Kept()
    trained(1, kept)
    return kept.bodies


@cache
def one_step_alone() -> torch.Tensor:
    return trained(1, None)[0]


def test_bytes_tell_what_was_packed() -> None:
    bundle, kept = a_bundle()
    again = unpack(bundle.pack())
    assert again.pack() == bundle.pack() == kept.bodies[BundlePlace(0, 0, 0)]
    assert again.mask is not None and len(again.ids) == 16 and again.logprobs is None
    assert any(0 in mask for mask in again.mask) and again.calls[0] > 0
    assert len(kept.bodies[BundlePlace(0, 0, 0)]) < 16_000 + 40 * sum(map(len, again.ids)) + 600 * 16


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"names": ["another"]}, "its rewards are another"),
        ({"ids": [[10**6]] * 16, "mask": [[1]] * 16}, "tokens outside of the vocabulary"),
        ({"ids": [[-1]] * 16, "mask": [[1]] * 16}, "tokens outside of the vocabulary"),
        ({"ids": [[1] * 999] * 16, "mask": [[1] * 999] * 16}, "completions of more than"),
        ({"mask": None}, "tool turns"),
        ({"prompts": [[{"role": "user", "content": "x"}] * 2] * 16}, "other rows"),
        ({"prompts": [["x"]] * 16}, "other rows"),
        ({"prompts": [[]] * 16}, "other rows"),
        ({"prompts": [[{"role": "user", "content": "op1 2 3"}]] * 16}, "other rows"),
        ({"prompts": "mixed"}, "other rows"),
        ({"prompt_ids": "altered"}, "other tokens"),
    ],
)
def test_a_bundle_that_does_not_fit_is_made_again(change: dict[str, Any], words: str) -> None:
    bundle, kept = a_bundle()
    if change.get("prompts") == "mixed":
        change = {"prompts": [*bundle.prompts[1:], bundle.prompts[0]]}
    if "prompt_ids" in change:
        change = {"prompt_ids": [*bundle.prompt_ids[:-1], [*bundle.prompt_ids[-1][:-1], 1]]}
    kept.bodies[BundlePlace(0, 0, 0)] = replace(bundle, **change).pack()
    alone = one_step_alone()
    here, _ = trained(1, kept)
    assert words in kept.refused[0] and torch.equal(alone, here) and not kept.found


PARTS = [{"type": "text", "text": "op0 3 4"}]


@pytest.mark.parametrize(
    ("said", "asked", "adds", "fits"),
    [
        ("op0 3 4", "op0 3 4", False, True),
        ("op0 3 4 (try 1)", "op0 3 4", False, False),
        ("op0 3 4 (try 1)", "op0 3 4", True, True),
        ("op1 3 4 (try 1)", "op0 3 4", True, False),
        ([*PARTS, *PARTS], "op0 3 4", True, True),
        ([*PARTS, {"type": "text", "text": "x"}], PARTS, True, True),
        ([{"type": "text", "text": "x"}, *PARTS], PARTS, True, False),
        ("op0 3 4", PARTS, True, False),
        (None, "op0 3 4", True, False),
        (7, "op0 3 4", True, False),
    ],
)
def test_only_an_environment_adds_to_a_rows_prompt(said: Any, asked: Any, adds: bool, fits: bool) -> None:
    row = {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": asked}]}
    told = {"role": "user", "content": said}
    assert _begins_as([{"role": "system", "content": "s"}, told], row, adds) == fits
    assert not _begins_as([{"role": "system", "content": "t"}, told], row, adds)
    assert not _begins_as([{"role": "system", "content": "s"}, {**told, "role": "assistant"}], row, adds)
    assert not _begins_as([told], row, adds)


def test_its_texts_can_be_read_without_torch_and_without_known_secrets() -> None:
    bundle, _ = a_bundle()
    body = replace(bundle, completions=[[{"role": "assistant", "content": "my hidden-key"}]] * 16).pack()
    rollouts = bundle_rollouts(body, ["hidden-key"])
    assert [r["messages"][-1]["content"] for r in rollouts] == ["my ***"] * 16
    assert [r["reward"] for r in rollouts] == bundle.rewards[:, 0].tolist() and rollouts[0]["first"] == 1
    with pytest.raises(ValueError, match="not a bundle"):
        bundle_rollouts(body[:50])


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_torn_bytes_are_no_bundle(cut: int) -> None:
    bundle, _ = a_bundle()
    with pytest.raises(ValueError, match="not a bundle"):
        unpack(bundle.pack()[:cut])


def test_hostile_bytes_are_no_bundle() -> None:
    import safetensors.torch as st

    bundle, _ = a_bundle()
    tensors = st.load(bundle.pack())
    for name, tensor in (("lengths", tensors["lengths"] + 1), ("rewards", tensors["rewards"][:3])):
        changed = {**tensors, name: tensor}
        with pytest.raises(ValueError, match="not a bundle"):
            unpack(st.save(changed, {"bundle": "{}"}))
    with pytest.raises(ValueError, match="not a bundle"):
        unpack(st.save(tensors, {"other": "{}"}))


def again(bundle: Bundle, said: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Bundle:
    """Unpack the bundle with some of its tensors (None: without it) and of its words changed."""
    import safetensors.torch as st

    body = bundle.pack()
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    words = json.loads(header["__metadata__"]["bundle"]) | (said or {})
    kept = {name: tensor for name, tensor in {**st.load(body), **tensors}.items() if tensor is not None}
    return unpack(st.save(kept, {"bundle": json.dumps(words)}))


def some_rollouts(**changes: Any) -> Bundle:
    """Two rollouts of three tokens, the second of a tool."""
    text = [{"role": "user", "content": "x"}]
    return replace(
        Bundle(
            prompts=[text, text], completions=[text, text], prompt_ids=[[1, 2]] * 2, ids=[[3, 4, 5]] * 2,
            mask=[[1, 0, 1]] * 2, logprobs=[[-1.0] * 3] * 2, rewards=torch.tensor([[1.0], [float("nan")]]), names=["r"],
            weights=[1.0], environments=["a", None],
        ),
        **changes,
    )  # fmt: skip


def numbers(*values: float, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


ASKED = [{"role": "user", "content": "a"}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
AS_TRL_WRITES: list[Any] = [
    [{"role": "tool", "name": "f", "content": [np.int64(3), date(2026, 1, 2)]}],  # a tool's result of any kind
    [{"role": "assistant", "content": "", "tool_calls": [CALL], "thinking": "x"}, {"role": "tool", "content": "3"}],
    [{"role": "assistant", "content": "x", "tool_calls": None}],
    [{"role": "assistant", "content": "", "tool_calls": [{"type": "custom", "name": "f", "arguments": "{"}]}],
]


def test_what_a_trainer_may_have_made_can_be_read() -> None:
    for made in (
        some_rollouts(),
        some_rollouts(mask=None, logprobs=None, environments=None),
        some_rollouts(rewards=torch.tensor([[1e18], [-1e18]])),  # the largest (attempts.py)
        some_rollouts(rewards=torch.full((2, 1), float("nan"))),  # no completion could be judged
        *(some_rollouts(prompts=[ASKED] * 2, completions=[told] * 2) for told in AS_TRL_WRITES),
        some_rollouts(logprobs=[[None, -1.0, -1.0], [-1.0] * 3]),  # an engine had none for a token
    ):
        assert again(made).pack() == made.pack()
        restore(again(made).random)
    assert again(some_rollouts(), mask=numbers(1, 0, 1, 1, 0, 1, dtype=torch.bool)).mask == [[1, 0, 1]] * 2


WRONG_TENSORS: list[tuple[dict[str, Any], str]] = [
    ({"torch": None}, "random states cannot be restored.*KeyError: 'torch'"),
    ({"torch": torch.zeros(5, dtype=torch.uint8)}, "random states cannot be restored here, by torch"),
    ({"torch": torch.zeros(5056, dtype=torch.uint8)}, "random states cannot be restored"),
    ({"numpy": None}, "KeyError: 'numpy'"),
    ({"numpy": torch.zeros(7, dtype=torch.int64)}, "random states cannot be restored"),
    ({"numpy": torch.full((624,), -1)}, "numpy's words"),
    ({"numpy": torch.full((624,), 0.5)}, "numpy's words"),
    ({"python": None}, "KeyError: 'python'"),
    ({"python": torch.zeros(6, dtype=torch.int64)}, "random states cannot be restored"),
    ({"python": torch.full((625,), -1)}, "random states cannot be restored"),
    ({"ids": numbers(3.5, 4, 5, 3, 4, 5, dtype=torch.float32)}, "ids are torch.float32"),
    ({"prompt_ids": numbers(1, 2, 1, 2, dtype=torch.float64)}, "prompt_ids are torch.float64"),
    ({"ids": numbers(3, 4, 5, 3, 4, 5, dtype=torch.complex64)}, "ids are torch.complex64"),
    ({"ids": numbers(3, 4, 5, 3, 4)}, "its ids: 5 values do not fit the lengths of 2 rollouts"),
    ({"mask": numbers(1, 0, 1, 1, 0)}, "its mask: 5 values do not fit"),
    ({"logprobs": numbers(-1, -1, dtype=torch.float32)}, "its logprobs: 2 values do not fit"),
    ({"logprobs": numbers(-1, -1, -1, -1, -1, -1)}, "logprobs are torch.int32"),
    ({"lengths": numbers(3, 3, dtype=torch.float32)}, "their lengths torch.float32"),
    ({"lengths": numbers(float("inf"), 3, dtype=torch.float32)}, "their lengths torch.float32"),
    ({"lengths": numbers(6, 0)}, "its ids: 6 values do not fit"),
    ({"mask": numbers(1, 255, 1, 1, 0, 1, dtype=torch.uint8)}, r"its mask.*\[1, 255, 1\]"),
    ({"mask": numbers(0, 1, 1, 1, 0, 1, dtype=torch.uint8)}, r"its mask.*begin.*\[0, 1, 1\]"),
    ({"rewards": torch.tensor([[float("inf")], [0.0]])}, "a reward of inf; the largest is 1e"),
    ({"rewards": torch.tensor([[0.0], [-float("inf")]])}, "a reward of -inf"),
    ({"rewards": torch.tensor([[1e30], [0.0]])}, r"a reward of 1\.0"),
    ({"rewards": torch.tensor([[1.0, 0.0]])}, "different numbers of rollouts"),
]


@pytest.mark.parametrize(("tensors", "words"), WRONG_TENSORS, ids=lambda x: x if isinstance(x, str) else "")
def test_tensors_that_no_trainer_can_train_on_are_no_bundle(tensors: dict[str, Any], words: str) -> None:
    before = random.getstate(), torch.random.get_rng_state()
    with pytest.raises(ValueError, match=f"(?s)^not a bundle of rollouts: .*{words}"):
        again(some_rollouts(), **tensors)
    assert random.getstate() == before[0] and torch.equal(torch.random.get_rng_state(), before[1])


def messages(*said: Any) -> dict[str, Any]:
    return {"prompts": [ASKED], "prompt_of": [0, 0], "completions": [list(said)] * 2}


ODD: list[dict[str, Any]] = [
    {"role": 3},
    {"content": 3},
    {"tool_calls": -1},
    {"tool_calls": {"function": {"name": "f"}}},
    {"tool_calls": ["f"]},
    {"tool_calls": [{}]},
    {"tool_calls": [{"function": None}]},
    {"tool_calls": [{"function": {"arguments": {}}}]},
    {"tool_calls": [{"function": {"name": 3}}]},
]
STATES = RandomStates.read().numbers
WRONG_WORDS: list[tuple[dict[str, Any], str]] = [
    ({"random": {}}, "random states cannot be restored"),
    ({"random": None}, "random states cannot be restored"),
    ({"random": {**STATES, "numpy": [10**9, 0, 0.0]}}, "numpy's position is 1000000000"),
    ({"random": {**STATES, "numpy": [-1, 0, 0.0]}}, "numpy's position is -1"),
    ({"random": {**STATES, "numpy": [1, 0]}}, "random states cannot be restored"),
    ({"random": {**STATES, "python": [99, None]}}, "random states cannot be restored"),
    ({"random": {**STATES, "python": [3, "x"]}}, "next normal number is 'x'"),
    ({"names": [7]}, "one name and one weight each"),
    ({"names": "r"}, "one name and one weight each"),
    ({"weights": []}, "one name and one weight each"),
    ({"weights": [float("nan")]}, "its weights"),
    ({"weights": [10**400]}, "OverflowError"),
    ({"calls": [float("inf"), 0]}, "OverflowError"),
    ({"calls": [-1, 0]}, "counts of tool calls"),
    ({"calls": [10**30, 0]}, "counts of tool calls"),
    ({"completions": ["y", None]}, "completions do not fit their prompts"),
    ({"completions": ["y", []]}, "completions do not fit their prompts"),
    ({"completions": {"a": 1, "b": 2}}, "completions do not fit their prompts"),
    ({"completions": ["y", ["a", "b"]]}, "completions do not fit their prompts"),
    ({"completions": ["y"]}, "different numbers of rollouts"),
    ({"completions": ["y", ASKED]}, "completions do not fit their prompts"),
    *((messages({"role": "assistant", "content": "", **odd}), "completions do not fit their prompts") for odd in ODD),
    ({"prompt_of": [0, 0], "prompts": ["x"]}, "completions do not fit their prompts"),
    ({"environments": ["a"]}, "environments"),
    ({"environments": [1, 2]}, "environments"),
    *(({"opened": odd}, "its opened prompts are not") for odd in (3, [], [[]], [[], 3], [[], ["x"]], [[], [ODD[0]]])),
    ({"prompt_of": [0, 5]}, "IndexError"),
]


@pytest.mark.parametrize(("said", "words"), WRONG_WORDS, ids=lambda x: x if isinstance(x, str) else "")
def test_words_that_no_trainer_can_train_on_are_no_bundle(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^not a bundle of rollouts: .*{words}"):
        again(some_rollouts(), said)


def test_an_environment_is_not_reset_for_recorded_rollouts(tmp_path: Path) -> None:
    from tests.inner.test_environments_at_once import GOOD

    (tmp_path / "env.py").write_text(
        f'''class Env:
    resets = 0

    def reset(self, **row):
        Env.resets += 1
        return f" (try {{Env.resets}})"

    def {GOOD}(self, a: int, b: int) -> str:
        """The one.

        Args:
            a: first
            b: second
        """
        return str(a)

    def get_reward(self) -> float:
        return float(Env.resets % 5)
'''
    )
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "op0 3 4"}]}\n' * 4)
    config = InnerConfig(
        model=str(small_folder()), data={"prompts": "rows.jsonl"}, sampling={"environment": "env.py:Env"}, batch_size=16
    )
    files = {"prompts": tmp_path / "rows.jsonl", "environment": tmp_path / "env.py"}
    kept, found = Kept(), []
    for _ in range(2):
        loop: Any = build_inner(config, small_folder(), files, Seeds(data=0, noise=0))
        record_rollouts(loop.trainer, kept)
        loop.train(lambda: True)
        resets = type(loop.trainer.environments[0]).resets
        found.append((torch.cat([p.detach().flatten() for p in loop.model.parameters()]), resets))
    (first, resets), (second, then) = found
    assert torch.equal(first, second) and resets == then == 16
    assert kept.found and unpack(next(iter(kept.bodies.values()))).prompts[3][0]["content"] == "op0 3 4 (try 4)"

"""GrpoLoop as a driver sees it: stop, hooks, pop_metrics, data order over two lives, quiet, and learning."""

import json
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from inner.settings.inner import InnerConfig, Seeds
from inner.train.build import build_inner
from inner.train.grpo import _silence_libraries
from inner.usercode.reward_calls import RewardFailed
from tests.inner.test_toolworld import SMALL, small_folder
from tests.support.tables import merge_tables

torch.set_num_threads(1)


def build(seeds: Seeds | None = None, files: Any = None, warmup_steps: int = 0, **settings: Any) -> Any:
    config = InnerConfig(**merge_tables(SMALL, {"batch_size": 8}, settings))
    return build_inner(config, small_folder(), files or {}, seeds or Seeds(data=0, noise=0), warmup_steps)


def after(n: int) -> Any:
    """A stop() that is true on its n-th call."""
    calls = iter(range(1, n + 1))
    return lambda: next(calls) == n


def questions(loop: Any) -> list[list[str]]:
    """The prompts of every generation from now on."""
    asked: list[list[str]] = []
    original = loop.trainer._generate_and_score_completions

    def spy(rows: Any) -> Any:
        asked.append([row["prompt"][0]["content"] for row in rows])
        return original(rows)

    loop.trainer._generate_and_score_completions = spy
    return asked


@pytest.mark.slow
def test_stop_is_asked_after_every_inner_step_and_training_goes_on() -> None:
    loop = build()
    steps: list[int] = []
    loop.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    asked = questions(loop)
    loop.train(after(3))
    assert len(steps) == 3
    loop.train(after(2))
    assert len(steps) == 5
    whole = build()
    in_one = questions(whole)
    whole.train(after(5))
    assert asked == in_one  # two calls see the same data as one


def test_what_a_hook_raises_leaves_train_unchanged() -> None:
    class Leaving(Exception):
        pass

    loop = build()
    error = Leaving("now")

    def leave(*_: Any) -> None:
        raise error

    handle = loop.optimizer.register_step_post_hook(leave)
    with pytest.raises(Leaving) as caught:
        loop.train(after(5))
    assert caught.value is error
    handle.remove()
    steps: list[int] = []
    loop.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    loop.train(after(2))
    assert len(steps) == 2


def test_hooks_may_rewrite_the_parameters_in_place() -> None:
    loop = build(sdpo={"weight": 0.1})
    kept = [p.detach().clone() for p in loop.model.parameters()]
    moved: list[float] = []

    def restore(*_: Any) -> None:
        with torch.no_grad():
            moved.append(max((p - k).abs().max().item() for p, k in zip(loop.model.parameters(), kept, strict=True)))
            for parameter, value in zip(loop.model.parameters(), kept, strict=True):
                parameter.copy_(value)

    loop.optimizer.register_step_post_hook(restore)
    loop.train(after(3))
    assert all(torch.equal(p, k) for p, k in zip(loop.model.parameters(), kept, strict=True))
    # with the start restored before each, no step can be far from it: lr is the largest stride of one Adam step
    assert len(moved) == 3 and 0 < max(moved) < 1e-3 * 8


def test_metrics_popped_in_a_hook_have_the_current_step() -> None:
    loop = build(sdpo={"weight": 0.1})
    popped: list[dict[str, float]] = []
    loop.optimizer.register_step_post_hook(lambda *_: popped.append(loop.pop_metrics()))
    divergences: list[float] = []
    original = loop.trainer._sdpo_loss

    def spy(*args: Any) -> torch.Tensor:
        divergences.append((found := original(*args)).item())
        return found

    loop.trainer._sdpo_loss = spy
    loop.train(after(2))
    assert divergences[0] != divergences[1]
    assert [found["loss/sdpo_kl"] for found in popped] == pytest.approx(divergences)
    for found in popped:
        assert found["samples"] == 8 and found["lr"] == 1e-3 and found["grad_norm"] > 0
        assert 0 <= found["reward"] <= 1 and 0 <= found["sdpo_coverage"] <= 1
        assert found["loss"] == pytest.approx(found["loss/grpo"] + 0.1 * found["loss/sdpo_kl"], abs=1e-5)
    assert loop.pop_metrics() == {"samples": 0}


@pytest.mark.parametrize(
    ("settings", "boundary"),
    [
        pytest.param({}, 1, marks=pytest.mark.slow),
        pytest.param({"gradient_accumulation_steps": 2}, 1, marks=pytest.mark.slow),
        pytest.param({"grpo": {"steps_per_generation": 2, "num_iterations": 2}}, 4, marks=pytest.mark.slow),
        ({"gradient_accumulation_steps": 2, "grpo": {"steps_per_generation": 2, "num_iterations": 2}}, 2),
    ],
)
def test_a_second_life_goes_on_in_the_data(settings: dict[str, Any], boundary: int) -> None:
    first = build(Seeds(data=4, noise=1), **settings)
    assert first.boundary == boundary
    asked = questions(first)
    first.train(after(2 * boundary + 1))
    assert len(asked) == 3 and len({str(rows) for rows in asked}) == 3  # one generation per boundary
    second = build(Seeds(data=4, noise=2, start=boundary), **settings)
    asked_later = questions(second)
    second.train(after(boundary + 1))
    assert asked_later == asked[1:]
    other = build(Seeds(data=5, noise=1), **settings)
    asked_other = questions(other)
    other.train(after(1))
    assert asked_other[0] != asked[0]


def test_a_life_that_starts_inside_a_generation_stays_in_phase() -> None:
    settings = {"grpo": {"num_iterations": 2}}
    loop = build(Seeds(data=4, noise=1, start=3), **settings)
    asked = questions(loop)
    loop.train(after(3))  # inner steps 3 | 4, 5: generations 1 | 2
    whole = build(Seeds(data=4, noise=1), **settings)
    asked_whole = questions(whole)
    whole.train(after(6))
    assert asked == asked_whole[1:3]


def test_samples_count_accumulated_batches() -> None:
    loop = build(gradient_accumulation_steps=2)
    divisors: list[int] = []
    original = loop.trainer._loss_divisor
    loop.trainer._loss_divisor = lambda: divisors.append(original()) or original()
    loop.train(after(1))
    assert loop.pop_metrics()["samples"] == 16
    assert set(divisors) == {2}


@pytest.mark.slow
def test_warm_up_of_a_life_and_of_the_run() -> None:
    def rates(**kwargs: Any) -> list[float]:
        loop = build(**kwargs)
        seen: list[float] = []
        loop.optimizer.register_step_pre_hook(lambda *_: seen.append(loop.optimizer.param_groups[0]["lr"]))
        for _ in range(3):  # one schedule over several calls
            loop.train(after(1))
        return seen

    assert rates(warmup_steps=2) == pytest.approx([5e-4, 1e-3, 1e-3])
    assert rates(schedule={"lr_warmup": 3}, seeds=Seeds(data=0, noise=0, start=2)) == pytest.approx(
        [7.5e-4, 1e-3, 1e-3]
    )


def test_quiet_and_no_files(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.chdir(tmp_path)
    loop = build()
    folder = Path(loop._folder)
    loop.train(after(2))
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert list(tmp_path.iterdir()) == []
    assert list(folder.rglob("*")) == []
    loop._own_folder.cleanup()
    assert not folder.exists()


def test_the_users_reward_environment_hint_and_prompts(tmp_path: Path) -> None:
    """All four from files; the environment's error reaches the file's own hint."""
    (tmp_path / "task.py").write_text(
        "hints = []\n"
        "class Env:\n"
        "    def reset(self, **row): self.row = row\n"
        "    def never(self, a: int) -> int:\n"
        "        '''Never called.\n\n        Args:\n            a: a number\n        '''\n"
        "        return a\n"
        "def hint(row, error):\n"
        "    hints.append((row['tag'], error))\n"
        "    return 'hint use ' + row['tag']\n"
        "def score(completions, tag, **columns):\n"
        "    return [float(len(c)) for c in completions]\n"
    )
    rows = [{"prompt": [{"role": "user", "content": f"op0 {i} 2"}], "tag": f"t0_{i}"} for i in range(3)]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    files = {"reward": tmp_path / "task.py", "environment": tmp_path / "task.py", "prompts": tmp_path / "p.jsonl"}
    names = {
        "rewards": {"function": "task.py:score"},
        "sampling": {"environment": "task.py:Env"},
        "data": {"prompts": "p.jsonl"},
    }
    loop = build(files=files, sdpo={"weight": 0.1}, **names)
    loop.train(after(1))
    found = loop.pop_metrics()
    assert found["reward"] >= 1 and found["sdpo_coverage"] > 0
    tag, error = unwrap(loop.trainer.hint).__globals__["hints"][0]
    assert tag in ("t0_0", "t0_1", "t0_2") and "not found" in error


def test_a_reward_that_goes_wrong_in_the_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def f(completions, **columns):\n    return [1.0] * (len(completions) - 1)\n")
    loop = build(files={"reward": tmp_path / "r.py"}, rewards={"function": "r.py:f", "retries": 0})
    with pytest.raises(RewardFailed, match=r"the reward f [\s\S]*returned 7 values for 8 completions"):
        loop.train(after(1))


def test_a_batch_without_a_reward_is_no_inner_step(tmp_path: Path) -> None:
    """Its gradient is zero, and the optimizer's momentum and decay would move the weights all the same."""
    (tmp_path / "r.py").write_text(
        "calls = [0]\n\n\ndef f(completions, **columns):\n    calls[0] += 1\n"
        "    return [float(i) if calls[0] in (1, 4) else None for i, _ in enumerate(completions)]\n"
    )
    loop = build(files={"reward": tmp_path / "r.py"}, rewards={"function": "r.py:f"}, weight_decay=0.1)
    hooks = list[int]()
    loop.optimizer.register_step_post_hook(lambda *_: hooks.append(len(thetas)))
    thetas = list[torch.Tensor]()

    def stop() -> bool:
        thetas.append(torch.cat([p.detach().reshape(-1).clone() for p in loop.model.parameters()]))
        return len(thetas) == 4

    loop.train(stop)
    assert torch.equal(thetas[0], thetas[1]) and torch.equal(thetas[1], thetas[2])
    assert not torch.equal(thetas[2], thetas[3]) and hooks == [0, 3], "what counts inner steps saw two"
    assert loop.pop_metrics()["samples"] == 16


@pytest.mark.slow
def test_grpo_with_hints_learns_the_small_world() -> None:
    loop = build(batch_size=16, sdpo={"weight": 0.1})
    rewards: list[float] = []
    for _ in range(4):
        loop.train(after(5))
        rewards.append(loop.pop_metrics()["reward"])
    assert rewards[0] < 0.6 and rewards[-1] > rewards[0] + 0.3, rewards


def test_a_warning_of_trl_with_a_whole_row_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    """TRL prints the row of a completion without a reward: a Harbor task's may have megabytes."""
    from trl.trainer import grpo_trainer

    with _silence_libraries():
        grpo_trainer.logger.logger.warning("All reward functions returned None for: %" + "x" * 1_000_000)
    (message,) = caplog.messages
    assert message.startswith("All reward functions returned None") and len(message) == 1000

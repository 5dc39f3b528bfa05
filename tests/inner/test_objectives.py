"""The menu of objectives: each preset's loss, through TRL's own code, against its formula; guards; what is inert;
dynamic sampling and the length penalty."""

import subprocess
import sys
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from inner.rollouts.dynamic import informative_groups, join_groups, refill_groups
from inner.settings.inner import InnerConfig, InnerError
from inner.settings.menu import format_menu
from inner.settings.objectives import (
    PO_OBJECTIVES,
    ObjectiveError,
    exactly_on_policy,
    inert_knobs,
    po_settings,
)
from inner.settings.poconfig import POConfig, make_dr_grpo_config, make_po_config
from inner.train.trainer import ComposerReplicationTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are importing from .trl.experimental"),
]
SMALL = {"output_dir": "unused", "use_cpu": True, "bf16": False, "max_completion_length": 10, "report_to": []}
STALE = {"num_iterations": 2}  # off-policy, at any accumulation
ON_POLICY = {"steps_per_generation": 1, "num_iterations": 1}
B, T = 4, 6
NAMES = list(PO_OBJECTIVES)


def config(name: str, **overrides: Any) -> POConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_po_config(name, **{**SMALL, **overrides})


# TRL's loss on crafted rollouts: everything is real but the model's forward


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


LENGTHS = torch.tensor([6, 1, 4, 2])
MASK = (torch.arange(T) < LENGTHS[:, None]).long()
ADVANTAGES = torch.tensor([1.0, -0.5, -1.5, 0.7], dtype=torch.float64)


def batch(old: Tensor | None) -> dict[str, Tensor]:
    ids = torch.zeros(B, T, dtype=torch.long)
    made = {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": ids,
        "completion_mask": MASK,
        "advantages": ADVANTAGES,
        "num_items_in_batch": 2 * MASK.sum(),  # a generation of two such micro-batches
    }
    return made if old is None else {**made, "old_per_token_logps": old}


class Accelerator:
    num_processes = 1

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    gather = staticmethod(lambda x: x)


def trl_loss(args: POConfig, logps: Tensor, old: Tensor | None, accumulated: int = 1) -> Tensor:
    """ComposerReplicationTrainer's policy loss, without a model around it."""
    trainer = object.__new__(ComposerReplicationTrainer)
    trainer.__dict__.update(
        args=args,
        model=SimpleNamespace(training=True),
        accelerator=Accelerator(),
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        beta=args.beta,
        max_completion_length=args.max_completion_length,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=accumulated,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (logps, torch.zeros(B, T), None)
    return trainer._policy_loss(trainer.model, batch(old))


def formula(name: str, args: POConfig, logps: Tensor, old: Tensor, accumulated: int = 1) -> Tensor:
    """The papers' objectives, written out."""
    a, m, n = ADVANTAGES[:, None], MASK.double(), LENGTHS.double()
    r = (logps - old).exp()
    s = (((logps - old) * m).sum(1) / n).exp()[:, None]
    low, high = args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high

    def clipped(ratio: Tensor) -> Tensor:
        return torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)

    # TRL spreads a generation's tokens (two micro-batches, here) over the inner steps that it serves.
    window_tokens = 2 * n.sum() * accumulated / args.steps_per_generation
    if name == "grpo":
        return -((clipped(r) * m).sum(1) / n).mean() / accumulated
    if name == "dr_grpo":
        return -(clipped(r) * m).sum() / (B * 10) / accumulated
    if name == "bnpo":
        return -(clipped(r) * m).sum() / n.sum() / accumulated
    if name in ("dapo", "lite_ppo"):
        return -(clipped(r) * m).sum() / window_tokens
    if name == "gspo":
        return -clipped(s)[:, 0].mean() / accumulated
    if name == "luspo":
        return -(n * clipped(s)[:, 0]).mean() / accumulated
    if name == "cispo":
        return -(r.clamp(max=high).detach() * a * logps * m).sum() / window_tokens
    if name == "sapo":
        tau = torch.where(a > 0, 1.0, 1.05)
        return -((4 / tau / (1 + (-tau * (r - 1)).exp()) * a * m).sum(1) / n).mean() / accumulated
    if name == "vespo":
        w = (((logps - old) * m).sum(1)).exp()[:, None].detach()
        k, lam = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
        return -(w**k * (lam * (1 - w)).exp() * a * logps * m).sum() / window_tokens
    assert name == "gmpo"
    x = logps - old
    one_sided = torch.where(a > 0, torch.minimum(x, torch.tensor(high)), torch.maximum(x, torch.tensor(-low)))
    return -(((one_sided * m).sum(1) / n).exp() * a[:, 0]).mean() / accumulated


SPREAD = {"gspo": 1e-3, "luspo": 5e-3, "cispo": 2.0, "gmpo": 0.6}  # of log π - log π_old, so that the clip bites


def off_policy(name: str) -> tuple[Tensor, Tensor]:
    old = -draw(1, B, T).abs() - 1
    moved = draw(2, B, T)
    if name in ("gspo", "luspo"):  # two sequences went where their advantage pushes: these are cut off
        moved[:2] = moved[:2].abs() * ADVANTAGES[:2, None].sign()
    return (old + SPREAD.get(name, 0.3) * moved).requires_grad_(), old


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("name", NAMES)
def test_off_policy_each_preset_is_its_formula(name: str, accumulated: int) -> None:
    args = config(name, gradient_accumulation_steps=accumulated)
    logps, old = off_policy(name)
    ours = trl_loss(args, logps, old, accumulated)
    ours_gradient = torch.autograd.grad(ours, logps)[0]
    reference = formula(name, args, logps, old, accumulated)
    torch.testing.assert_close(ours, reference, rtol=1e-6, atol=1e-10)  # TRL rounds its taus to float32
    torch.testing.assert_close(ours_gradient, torch.autograd.grad(reference, logps)[0], rtol=1e-6, atol=1e-10)
    assert (ours_gradient[MASK == 0] == 0).all()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "bnpo", "dapo", "lite_ppo", "gspo", "luspo", "gmpo"])
def test_the_clip_bites_in_these_tests(name: str) -> None:
    """A clipped token has no gradient (gmpo: nor a clipped share of its sequence's); without that nothing is tested."""
    logps, old = off_policy(name)
    gradient = torch.autograd.grad(trl_loss(config(name), logps, old), logps)[0]
    clipped = (gradient == 0) & (MASK == 1)
    assert clipped.any() and not clipped[MASK == 1].all()


def test_cispo_caps_and_keeps_every_token() -> None:
    logps, old = off_policy("cispo")
    gradient = torch.autograd.grad(trl_loss(config("cispo"), logps, old), logps)[0]
    assert ((logps - old).exp()[MASK == 1] > 5).any()
    assert (gradient[MASK == 1] != 0).all()


def test_gspo_at_grpo_s_epsilon_never_clips() -> None:
    """Why the preset has its own: at .2 not one sequence is cut off, in the same batch."""
    logps, old = off_policy("gspo")
    with pytest.warns(UserWarning, match=r"epsilon = 0\.2 never clips.*3?\.?0003"):
        wide = make_po_config("gspo", epsilon=0.2, epsilon_high=0.2, **SMALL)
    assert (torch.autograd.grad(trl_loss(wide, logps, old), logps)[0][MASK == 1] != 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_the_inert_ones_are_what_they_say(name: str) -> None:
    """Gradients at π = π_old, as directions: what `on_policy` in the menu names."""

    def direction(which: str) -> Tensor:
        logps = (-draw(1, B, T).abs() - 1).requires_grad_()
        gradient = torch.autograd.grad(trl_loss(config(which, **ON_POLICY), logps, None), logps)[0]
        return gradient / gradient.norm()

    left = {"gspo": "grpo", "sapo": "grpo", "gmpo": "grpo", "cispo": "lite_ppo", "vespo": "lite_ppo"}
    left |= {"dapo": "lite_ppo", "luspo": "dr_grpo"}
    inert = inert_knobs(name, vars(config(name, **ON_POLICY)))
    assert bool(inert) == (name in left)
    if name in left:
        torch.testing.assert_close(direction(name), direction(left[name]), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_an_inert_preset_warns_once_with_the_knob(name: str) -> None:
    def said(**settings: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            make_po_config(name, **{**SMALL, **settings})
        return [str(each.message) for each in seen if issubclass(each.category, UserWarning)]

    assert said(**STALE) == []
    on_policy = said(**ON_POLICY)
    if not PO_OBJECTIVES[name].ratio:
        assert on_policy == []
        (said_so,) = said(**ON_POLICY, epsilon=0.1)
        assert "epsilon does nothing" in said_so
    else:
        assert len(on_policy) == 1
        assert PO_OBJECTIVES[name].ratio[-1] in on_policy[0] and "steps_per_generation" in on_policy[0]


def test_the_sequence_presets_bring_their_stale_steps() -> None:
    for name in ("gspo", "luspo"):
        assert config(name, gradient_accumulation_steps=3).steps_per_generation == 12
        assert config(name, num_iterations=2).steps_per_generation == 1
        assert InnerConfig(grpo={"objective": name}, gradient_accumulation_steps=2).boundary == 4


@pytest.mark.parametrize(
    ("accumulated", "per_generation", "iterations", "on_policy"),
    [(1, None, 1, True), (4, None, 1, True), (4, 2, 1, True), (4, 8, 1, False), (2, 1, 2, True), (1, 1, 2, False)],
)
def test_when_a_run_is_on_policy(
    accumulated: int, per_generation: int | None, iterations: int, on_policy: bool
) -> None:
    settings = {
        "gradient_accumulation_steps": accumulated,
        "steps_per_generation": per_generation,
        "num_iterations": iterations,
    }
    assert exactly_on_policy(settings) == on_policy


# The presets


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("grpo", {"loss_type": "grpo", "scale_rewards": "group", "importance_sampling_level": "token"}),
        ("dr_grpo", {"loss_type": "dr_grpo", "scale_rewards": "none", "num_iterations": 1, "beta": 0.0}),
        ("bnpo", {"loss_type": "bnpo", "scale_rewards": "batch"}),
        ("dapo", {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True, "beta": 0.0}),
        ("dapo", {"dynamic_sampling": 10, "soft_overlong_tokens": 2, "scale_rewards": "group"}),
        ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}),
        ("cispo", {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("luspo", {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3}),
        ("sapo", {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}),
        ("vespo", {"loss_type": "vespo", "vespo_k_pos": 2.0, "vespo_lambda_neg": 2.0}),
        ("gmpo", {"loss_type": "gmpo", "epsilon": 0.4, "epsilon_high": 0.4}),
        ("lite_ppo", {"loss_type": "dapo", "scale_rewards": "batch", "dynamic_sampling": 0}),
    ],
)
def test_presets(name: str, held: dict[str, Any]) -> None:
    made = config(name)
    assert {knob: getattr(made, knob) for knob in held} == held
    assert made.objective == name


def test_dr_grpo_is_the_default_and_overrides_apply() -> None:
    assert make_po_config(**SMALL).objective == "dr_grpo"
    old = make_dr_grpo_config(**SMALL, learning_rate=3e-6)
    assert (old.loss_type, old.scale_rewards, old.learning_rate) == ("dr_grpo", "none", 3e-6)
    assert config("dapo", epsilon_high=0.4, dynamic_sampling=0).epsilon_high == 0.4
    assert config("grpo", scale_rewards=True).scale_rewards == "group"


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("gpso", {}, r"(?s)Did you mean 'gspo'\?.*dr_grpo.*lite_ppo"),
        ("grpo", {"epsilonhigh": 0.3}, "no setting epsilonhigh. Did you mean 'epsilon_high'"),
        ("gspo", {"importance_sampling_level": "token"}, r"'gspo' means .*'sequence', got 'token'.*objective = 'grpo'"),
        ("grpo", {"importance_sampling_level": "sequence"}, "objective = 'gspo'"),
        ("grpo", {"importance_sampling_level": "seq"}, "got 'seq'"),
        ("grpo", {"loss_type": "gspo"}, "objective = 'gspo'"),
        ("dr_grpo", {"loss_type": "dapo"}, "objective = 'dapo'"),
        ("dr_grpo", {"scale_rewards": "group"}, "'dr_grpo' means scale_rewards = 'none'"),
        ("bnpo", {"scale_rewards": "group"}, "means scale_rewards = 'batch'"),
        ("dapo", {"scale_rewards": "batch"}, "objective = 'lite_ppo'"),
        ("cispo", {"scale_rewards": "std"}, "One of: batch, group, none"),
        ("dapo", {"epsilon_high": 0.2}, "needs a larger range upwards than downwards"),
        ("cispo", {"epsilon_high": 0.2}, "Set epsilon_high = 5.0"),
        ("cispo", {"epsilon": 0.1}, "does not read epsilon"),
        ("sapo", {"delta": 2.0}, "does not read delta"),
        ("gmpo", {"delta": 2.0}, "does not read delta"),
        ("gmpo", {"router_aux_loss_coef": 0.1}, "does not read router_aux_loss_coef"),
        ("gmpo", {"use_bias_correction_kl": True}, "does not read use_bias_correction_kl"),
        ("grpo", {"vespo_k_pos": 1.0}, "does not read vespo_k_pos"),
        ("grpo", {"beta": -0.1}, "beta = -0.1 must be 0"),
        ("grpo", {"epsilon": 0.0}, "epsilon = 0.0 must be greater"),
        ("dapo", {"dynamic_sampling": -1}, "dynamic_sampling = -1 must be 0"),
        ("grpo", {"delta": 0.2}, "delta = 0.2 caps the ratio r, which is 1 on-policy"),
        ("dapo", {"delta": 1.0}, "delta = 1.0 caps .* Set delta = 4.0"),
        ("grpo", {"delta": float("nan")}, "delta = nan"),
        ("grpo", {"off_policy_mask_threshold": -0.1}, "off_policy_mask_threshold = -0.1 must be 0"),
        ("dapo", {"soft_overlong_tokens": 11}, "every answer would be punished"),
    ],
)
def test_guards_at_construction(name: str, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(ObjectiveError, match=words):
        make_po_config(name, **{**SMALL, **overrides})


def test_a_length_penalty_above_the_completions_is_refused_before_the_start() -> None:
    """Before, `plan` said nothing, and the replica ended: toolworld has 24 tokens by default."""
    with pytest.raises(InnerError, match="soft_overlong_tokens = 64 is more than max_completion_length = 24"):
        InnerConfig.from_dict({"model": "toolworld", "grpo": {"soft_overlong_tokens": 64}}).check()


@pytest.mark.parametrize("delta", [1.3, 1.1])
def test_a_cap_above_1_leaves_every_on_policy_gradient(delta: float) -> None:
    """At r = 1, where below 1 it left none to right answers."""
    logps, _ = off_policy("grpo")
    alike = torch.equal(
        *(
            torch.autograd.grad(trl_loss(config("grpo", **ON_POLICY, **capped), logps, None), logps)[0]
            for capped in ({}, {"delta": delta})
        )
    )
    assert alike and config("grpo", delta=delta, off_policy_mask_threshold=0.0).delta == delta


def test_a_preset_that_did_not_apply_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if TRL came to rewrite one of its fields."""
    from trl.trainer.grpo_config import GRPOConfig

    original = GRPOConfig.__post_init__

    def rewriting(self: Any) -> None:
        original(self)
        self.epsilon_high = 0.3

    monkeypatch.setattr(GRPOConfig, "__post_init__", rewriting)
    with pytest.raises(ObjectiveError, match=r"did not apply: epsilon_high = 0\.28 .* holds 0\.3"):
        make_po_config("dapo", **SMALL)


def test_a_config_by_hand_is_checked_too() -> None:
    with pytest.raises(ObjectiveError, match="'gspo' means"):
        POConfig(**SMALL, objective="gspo")
    assert issubclass(ObjectiveError, InnerError) and issubclass(ObjectiveError, ValueError)


# The run's config and the command


def test_run_config_keys() -> None:
    assert InnerConfig().grpo.objective == "dr_grpo"
    assert InnerConfig(grpo={"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon": 0.1}).grpo.overrides == {
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "epsilon": 0.1,
    }
    for wrong, words in (
        ({"grpo": {"objective": "ppo"}}, "The menu"),
        ({"grpo": {"objective": "gspo", "loss_type": "dapo"}}, "another objective"),
        ({"sdpo": {"weight": -1.0}}, "must be at least 0"),
    ):
        with pytest.raises(InnerError, match=words):
            InnerConfig(**wrong)  # type: ignore[arg-type]


def test_the_loop_s_arguments_hold_the_objective() -> None:
    from inner.settings.inner import Seeds
    from inner.train.grpo import trainer_arguments

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in NAMES:
            run = InnerConfig(grpo={"objective": name})
            held = trainer_arguments(run, Seeds(data=0, noise=0), "unused")
            assert held.objective == name and held.loss_type == PO_OBJECTIVES[name].fixed["loss_type"]
            assert held.steps_per_generation * held.num_iterations == run.generation_steps
    assert (
        trainer_arguments(
            InnerConfig(grpo={"epsilon": 0.1, "num_iterations": 2}), Seeds(data=0, noise=0), "unused"
        ).epsilon
        == 0.1
    )


def test_the_menu() -> None:
    text = format_menu()
    for name, each in PO_OBJECTIVES.items():
        assert name in text and each.formula in text and each.when in text
    assert "here    inert on-policy: epsilon, epsilon_high" in text
    assert "inert" not in format_menu({"num_iterations": 2})
    assert format_menu({"steps_per_generation": 1}).count("inert") == sum(
        bool(each.ratio) for each in PO_OBJECTIVES.values()
    )


def test_the_command_prints_the_menu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from executors.cli.main import main

    run = tmp_path / "run.toml"
    run.write_text('[inner]\ngrpo.objective = "dapo"\ngrpo.num_iterations = 2\n')
    assert main(["objectives", str(run)]) == 0
    text = capsys.readouterr().out
    assert "objective = 'dapo'" in text and "lite_ppo" in text and "inert" not in text
    assert main(["objectives"]) == 0
    assert "inert" in capsys.readouterr().out


def test_the_menu_needs_no_torch() -> None:
    code = (
        "import inner.settings.inner, sys; from inner.settings.menu import format_menu; format_menu(); "
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


# Dynamic sampling


def groups(*rewards: list[float], width: int = 3, ids: int = 1) -> dict[str, Any]:
    """TRL's batch for groups of these rewards, with prompts and completions `width` wide."""
    flat = torch.tensor(rewards)
    rows = flat.numel()
    return {
        "advantages": (flat - flat.mean(1, keepdim=True)).flatten(),
        "prompt_ids": torch.full((rows, width), ids),
        "prompt_mask": torch.ones(rows, width, dtype=torch.long),
        "completion_ids": torch.full((rows, width), ids),
        "completion_mask": torch.ones(rows, width, dtype=torch.long),
        "lessons": [[ids]] * rows,
        "num_items_in_batch": torch.tensor(rows * width),
    }


def test_a_group_whose_rewards_agree_is_silent() -> None:
    made = groups([0.1, 0.1, 0.1], [0.1, 0.2, 0.1], [1.0, 1.0, 1.0])
    assert informative_groups(made, 3) == [1]


def test_silent_groups_are_replaced() -> None:
    asked: list[int] = []
    further = [groups([1.0, 1.0], [0.0, 1.0], width=5, ids=2), groups([1.0, 0.0], width=2, ids=3)]

    def more(n: int) -> dict[str, Any]:
        asked.append(n)
        return further[len(asked) - 1]

    first = groups([0.0, 0.0], [0.0, 1.0], [1.0, 1.0])
    made, good, tries = refill_groups(first, more, 2, tries=9)
    assert (good, tries, asked) == (3, 2, [2, 1])
    assert made["completion_ids"][:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert made["lessons"] == [[1], [1], [2], [2], [3], [3]]
    assert made["completion_mask"].sum(1).tolist() == [3, 3, 5, 5, 2, 2]
    assert made["prompt_mask"].tolist()[0] == [0, 0, 1, 1, 1] and made["completion_mask"].tolist()[0] == [1, 1, 1, 0, 0]
    assert made["num_items_in_batch"] == 20
    assert made["advantages"].tolist() == [-0.5, 0.5, -0.5, 0.5, 0.5, -0.5]


def test_what_cannot_be_replaced_stays() -> None:
    first = groups([0.0, 0.0], [0.0, 1.0])
    made, good, tries = refill_groups(first, lambda n: groups([1.0, 1.0]), 2, tries=3)
    assert (good, tries) == (1, 3)
    assert made["advantages"].tolist() == [-0.5, 0.5, 0.0, 0.0]
    untouched, good, tries = refill_groups(groups([0.0, 1.0]), lambda n: pytest.fail("no need"), 2, tries=3)
    assert (good, tries) == (1, 0) and untouched["num_items_in_batch"] == 6


def test_joined_batches_count_only_what_the_loss_counts() -> None:
    tools = {"tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}
    made = join_groups([groups([0.0, 1.0]) | tools], [(0, 0)], 2)
    assert made["num_items_in_batch"] == 5


@pytest.fixture(scope="module")
def small_trainer() -> Any:
    from tests.inner.test_trainer import make

    return make


def test_dapo_in_the_trainer(small_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real rollouts. The reward agrees within the first generation, and differs from the second on."""
    from tests.inner import test_trainer

    calls: list[int] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        calls.append(len(completions))
        return [float(len(calls) > 1 and i % 2) for i in range(len(completions))]

    monkeypatch.setattr(test_trainer, "SMALL", {**test_trainer.SMALL, "grpo": {"objective": "dapo"}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = small_trainer(reward=reward, objective="dapo")
        made = test_trainer.rollouts(trainer)
    rows = len(made["advantages"])
    assert (
        calls == [rows, rows]
        and len(informative_groups(made, trainer.num_generations)) * trainer.num_generations == rows
    )
    noted = trainer._metrics["train"]
    assert noted["dynamic/informative"] == [1.0] and noted["dynamic/generations"] == [1.0]
    assert trainer.reward_func_names == ["reward", "soft_overlong_punishment_reward"]
    assert "rewards/soft_overlong_punishment_reward/mean" in noted
    mask = made["completion_mask"] * made.get("tool_mask", 1)
    assert made["num_items_in_batch"] == mask.sum()
    trainer._compute_loss(trainer.model, made).backward()


def test_refills_do_not_count_in_the_metrics_of_the_data(small_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight groups of mean .44 and ten refills of one right group each had the mean .95, as if a batch weighed as much
    as a group."""
    from tests.inner import test_trainer

    def reward(completions: list[Any], **_: Any) -> list[float]:
        whole = len(completions) == test_trainer.B  # one group teaches; the other is wrong, and its refills right
        return [0.0] * 8 + [0.0, 1.0] * 4 if whole else [1.0] * len(completions)

    monkeypatch.setattr(test_trainer, "SMALL", {**test_trainer.SMALL, "grpo": {"objective": "dapo"}})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = small_trainer(
            reward=reward, objective="dapo", config={"grpo": {"dynamic_sampling": 3, "soft_overlong_tokens": 0}}
        )
        test_trainer.rollouts(trainer)
    noted = trainer._metrics["train"]
    assert noted["dynamic/generations"] == [3.0] and noted["dynamic/informative"] == [0.5]
    assert noted["reward"] == [0.25] and noted["frac_reward_zero_std"] == [0.5]
    assert len(noted["completions/mean_length"]) == 1 and noted["rewards/reward/mean"] == [0.25]


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_a_loop_trains_with_it(name: str) -> None:
    """One generation serves four inner steps, so that the ratio leaves 1 and the clip has work; then a fresh one."""
    from tests.inner.test_grpo import after, build

    loop = build(grpo={"objective": name, "steps_per_generation": 4}, lr=1e-2)
    clipped: list[float] = []
    watched = loop.trainer._metrics["train"]
    loop.optimizer.register_step_pre_hook(lambda *_: clipped.append(sum(watched.get("clip_ratio/region_mean", [0.0]))))
    before = [p.detach().clone() for p in loop.model.parameters()]
    generations: list[int] = []
    rollouts = loop.trainer._generate_rollouts
    loop.trainer._generate_rollouts = lambda rows: generations.append(len(rows)) or rollouts(rows)
    loop.train(after(5))
    assert loop.boundary == 4 and generations == [32, 32]
    assert any(not torch.equal(p, q) for p, q in zip(before, loop.model.parameters(), strict=True))
    assert loop.pop_metrics()["loss"] != 0


def test_the_trainer_refuses_arguments_of_another_objective(small_trainer: Any) -> None:
    with pytest.raises(InnerError, match="'gspo' means"):
        small_trainer(objective="gspo")
    with pytest.raises(InnerError, match="The menu"):
        small_trainer(objective="ppo")


def test_settings_take_none_as_the_preset_s_value() -> None:
    assert po_settings("gspo", {"epsilon": None})["epsilon"] == 3e-4

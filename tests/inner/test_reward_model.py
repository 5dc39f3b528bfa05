"""A reward model as a line of [inner.rewards.functions]: TRL's numbers, and what is refused on the laptop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from diloco.model.fetch import fetch_files
from diloco.run.config import ConfigError, RunConfig
from diloco.run.data_files import gather_data
from diloco.run.founding import open_run
from diloco.units import byte_size
from executors.preflight.outlook import size_lines
from inner import InnerConfig, InnerError
from inner.train.task import load_task
from inner.usercode.reward_model import make_reward
from rendezvous.clock import SystemClock
from tests.inner.test_toolworld import SMALL, WORLD, small_folder
from tests.support.fleet import Fleet
from tests.support.hf_models import HubModels
from tests.support.tables import merge_tables

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
NAME = "tester/judge-0.1m"
BRIEF = "def brief(completions, **columns):\n    return [1.0 / (1 + len(str(c))) for c in completions]\n"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    tokenizer = WORLD.tokenizer()
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def hub(judge: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with HubModels({NAME: judge}) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def config_of(folder: Path, functions: dict[str, float]) -> RunConfig:
    folder.mkdir(exist_ok=True)
    (folder / "rewards.py").write_text(BRIEF)
    inner = merge_tables(SMALL, {"loop": "grpo", "model": "toolworld", "rewards": {"functions": functions}})
    return RunConfig.from_dict({"inner": inner, "outer": {"sync_every": 2}}, folder)


def test_it_gives_trls_numbers(judge: Path, tmp_path: Path) -> None:
    """Chats of different lengths, in one batch of TRL's and in several of ours."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    rows = WORLD.rows(20, seed=1)
    prompts = [row["prompt"] for row in rows]
    completions = [[{"role": "assistant", "content": " ".join(["op0", "1", "2"][: 1 + n % 3])}] for n in range(20)]
    trainer: Any = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(small_folder()), reward_funcs=str(judge),  # type: ignore[arg-type]
        args=GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], bf16=False),
        processing_class=AutoTokenizer.from_pretrained(small_folder()), train_dataset=Dataset.from_list(rows),
    )  # fmt: skip
    theirs = trainer._calculate_rewards(rows, prompts, completions, [[1]] * len(prompts))[:, 0]
    ours = make_reward(judge, "judge")(prompts=prompts, completions=completions, answer=["x"] * 20)
    assert len({round(value, 6) for value in ours}) > 10
    torch.testing.assert_close(torch.tensor(ours), theirs.cpu(), atol=1e-6, rtol=1e-5)


def test_a_tool_call_with_half_a_character_has_a_reward(judge: Path) -> None:
    """Before: a TypeError of the tokenizer for the whole batch. `WORLD`'s template writes a call's name."""
    call = {"type": "function", "function": {"name": "a\udcff", "arguments": {"b": "\ud83d"}}}
    completion = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "a", "content": "1"},
    ]
    (value,) = make_reward(judge, "judge")(prompts=[WORLD.rows(1, seed=1)[0]["prompt"]], completions=[completion])
    assert isinstance(value, float)


def test_a_run_names_its_commit_and_a_replica_loads_it(hub: HubModels, tmp_path: Path) -> None:
    config = gather_data(config_of(tmp_path / "here", {f"hub:{NAME}": 0.5, "rewards.py:brief": 1.0}))
    pinned = f"hub:{NAME}@{hub.commit(NAME)}"
    assert config.inner.rewards.models == {"reward.judge-0.1m": pinned}
    run = open_run(config, str(tmp_path / "run"), SystemClock())
    assert run.record.mathematics["reward_models"] == {"reward.judge-0.1m": pinned}
    assert run.config.inner.rewards.weights == {"reward.brief": 1.0, "reward.judge-0.1m": 0.5}
    assert hub.downloaded() == ["config.json"]
    task = load_task(run.config.inner, fetch_files(run, tmp_path / "code"))
    assert [reward.__name__ for reward in task.rewards] == ["brief", "judge-0.1m"]
    assert "model.safetensors" in hub.downloaded()


BAD = {
    "no such model": ("hub:tester/nope", {}, "the Hub knows no such model"),
    "no such revision": (f"hub:{NAME}@v9", {}, "no revision 'v9' of it. Correct"),
    "no classifier": (
        f"hub:{NAME}",
        {"architectures": ["LlamaForCausalLM"]},
        "is LlamaForCausalLM, which gives no score",
    ),
    "several labels": (
        f"hub:{NAME}",
        {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "bad", "1": "good"}},
        "distinguishes 2 classes",
    ),
    "labels that its config does not name": (
        f"hub:{NAME}",
        {"architectures": ["LlamaForSequenceClassification"]},
        "distinguishes 2 classes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_model_that_is_none_is_refused(hub: HubModels, tmp_path: Path, case: str) -> None:
    spelling, other, words = BAD[case]
    if other:
        hub.swapped["config.json"] = json.dumps(other).encode()
    with pytest.raises(ConfigError, match=f"inner.rewards.functions: '{spelling}'.*{words}"):
        gather_data(config_of(tmp_path / "here", {spelling: 1.0}))


def test_a_gated_one(hub: HubModels, tmp_path: Path) -> None:
    hub.gated = {NAME}
    with pytest.raises(ConfigError, match=r"If it is gated, accept its terms at .*--secret HF_TOKEN"):
        gather_data(config_of(tmp_path / "here", {f"hub:{NAME}": 1.0}))


@pytest.mark.parametrize(
    ("rewards", "words"),
    [
        ({"functions": {"hub:judge": 1.0}}, "'hub:judge' is not a model's name. Write hub:OWNER/NAME"),
        ({"functions": {"hub:a/judge": 1.0, "b.py:judge": 1.0}}, "have the same name"),
        ({"function": "hub:a/judge"}, r'Write it as a line of \[inner.rewards.functions\]: "hub:a/judge" = 1.0'),
    ],
)
def test_lines_that_cannot_be(rewards: dict[str, Any], words: str) -> None:
    with pytest.raises(InnerError, match=words):
        InnerConfig(**merge_tables(SMALL, {"rewards": rewards}))


@pytest.mark.slow
def test_two_replicas_learn_from_it(hub: HubModels, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(BRIEF)
    fleet = Fleet(
        tmp_path, environ={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "", "HF_HOME": str(tmp_path / "hf2")},
        inner={
            **SMALL, "loop": "grpo", "model": "toolworld", "data": {"text": None, "context_length": 64},
            "rewards": {"functions": {f"hub:{NAME}@{hub.commit(NAME)}": 1.0, "rewards.py:brief": 0.0}},
        },
        outer={"sync_every": 1}, fleet={"replicas": 2, "steps": 2},
    )  # fmt: skip
    fleet.start("r00")
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
    text = "".join(path.read_text() for path in Path(fleet.url).glob("log/r*/*.jsonl"))
    assert '"reward/judge-0.1m": ' in text


def test_plan_says_what_it_weighs(hub: HubModels, judge: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path / "here", {f"hub:{NAME}": 0.5, "rewards.py:brief": 1.0})
    size = sum(4 * p.numel() for p in LlamaForSequenceClassification.from_pretrained(judge).parameters())
    assert f"reward model {NAME}: {byte_size(size)} more on the device" in "\n".join(size_lines(config, 2, 3))
    hub.gated.add(NAME)
    assert "its size could not be read" in "\n".join(size_lines(config, 2, 3))

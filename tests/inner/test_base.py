"""Config, seeds, user files, lazy imports: what is refused, with which next step."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from inner import InnerConfig, InnerError, Seeds, check_inner
from inner.usercode.rehearse import copy_files, rehearse
from inner.usercode.userfiles import load_module

OWN = {"model": "some/model", "data": {"prompts": "p.jsonl"}, "rewards": {"function": "r.py:f"}}


def test_config_is_plain_data() -> None:
    config = InnerConfig(sdpo={"weight": 0.1}, grpo={"epsilon_high": 0.3})
    assert InnerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(InnerError, match=r"unknown setting inner\.alpha; did you mean inner\.lora\.alpha"):
        InnerConfig.from_dict({"alpha": 1})
    with pytest.raises(AttributeError):
        config.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loop": "ppo"}, "grpo, supervised"),
        ({"dtype": "fp8"}, "float32"),
        ({"dtype": "float16"}, "cannot be trained.*epsilon of 1e-8 is 0.*Use float32"),
        (
            {"loop": "supervised", "model": "tiny", "data": {"text": "a.txt"}, "sampling": {"num_generations": 4}},
            'only where inner.loop = "grpo"',
        ),
        (
            {"loop": "supervised", "model": "tiny", "data": {"text": "a.txt"}, "gradient_checkpointing": True},
            "does nothing here",
        ),
        ({"data": {"text": "a.txt"}}, 'only where inner.loop = "supervised"'),
        ({**OWN, "toolworld": {"kinds": 3}}, 'only where inner.model = "toolworld"'),
        ({"revision": "main"}, "only where inner.model is on the Hub"),
        (
            {"sdpo": {"weight": 1.0, "teacher": "ema"}, "grpo": {"weight": 0.0, "epsilon_high": 0.3}},
            "only where inner.grpo.weight is above 0",
        ),
        ({"grpo": {"weight": 0.0}}, "learns nothing"),
        ({"sdpo": {"weight": 0.1, "token_clip": 0.4}}, "never clips: at inner.sdpo.jsd_beta = 0.5.*exceeds 0.347"),
        ({"grpo": {"loss_type": "gspo"}}, "dr_grpo"),
        ({"grpo": {"scale_rewards": "std"}}, "batch, group, none"),
        ({"sdpo": {"teacher": "old"}}, "round, frozen, ema, live"),
        ({"sdpo": {"weight": -0.1}}, "inner.sdpo.weight = -0.1 must be at least 0"),
        ({"weight_decay": -1.0}, "inner.weight_decay = -1.0 must be at least 0"),
        ({"lr": 0.0}, "inner.lr = 0.0 must be greater than 0"),
        ({"sampling": {"temperature": float("nan")}}, "temperature = nan"),
        ({"batch_size": 12}, "Set inner.batch_size to 8"),
        ({"sampling": {"num_generations": 1}}, "Set inner.sampling.num_generations to 8"),
        ({"gradient_accumulation_steps": 2, "grpo": {"steps_per_generation": 3}}, "do not divide"),
        ({"grpo": {"objective": "cispo", "epsilon_high": 0.2}}, "epsilon_high = 5.0"),
        ({"grpo": {"objective": "gpso"}}, "(?s)Did you mean 'gspo'.*lite_ppo"),
        ({"grpo": {"dynamic_sampling": -1}}, "dynamic_sampling = -1 must be 0"),
        ({"model": "tiny"}, "no chat template"),
        ({**OWN, "data": {"prompts": None}}, "Set inner.data.prompts"),
        ({**OWN, "rewards": {"function": None}}, "Set inner.rewards.function"),
        ({**OWN, "sdpo": {"weight": 0.1}}, "can never report one"),
        ({"sdpo": {"weight": 0.1}, "sampling": {"max_tool_calling_iterations": 0}}, "can never report one"),
        ({**OWN, "sampling": {"max_tool_calling_iterations": 4}}, "iterations = 4 does nothing here.*environment or"),
        ({**OWN, "sampling": {"tool_workers": 8}}, "tool_workers = 8 does nothing here"),
        ({**OWN, "sampling": {"tool_timeout_s": 9}}, "tool_timeout_s = 9.0 does nothing here"),
        ({"sampling": {"box_usd_per_hour": 0.1}}, "per_hour = 0.1 does nothing here.* only where inner.sampling.boxes"),
        ({"sdpo": {"weight": 1.0, "teacher": "live"}}, 'sdpo.teacher = "round" or "frozen"'),
        ({"sdpo": {"weight_end": 1.0, "teacher": "live"}, "schedule": {"weight_steps": 9}}, "collapses"),
        ({"replay": {"weight": -0.1}}, "inner.replay.weight = -0.1 must be at least 0"),
        ({"replay": {"weight": 0.1}}, "no pairs to learn from"),
        ({"replay": {"pairs": "p.jsonl"}}, "would teach nothing"),
        ({"sdpo": {"weight": 0.1, "weight_end": 0.0}}, "Set inner.schedule.weight_steps"),
        ({"sdpo": {"weight": 0.1, "wrapper": "taid"}}, "Set inner.schedule.weight_steps"),
        ({"schedule": {"weight_steps": 5}}, "changes nothing"),
        ({"sdpo": {"taid_t_start": 0.9, "taid_t_end": 0.5}}, "start <= end"),
        ({"sdpo": {"ema_rate": 2.0}}, "greater than 0 and at most 1"),
        ({"replay": {"label_smoothing": 0.5}}, "below 0.5"),
        ({"sdpo": {"weight": 0.1, "context": "rollout", "token_clip": 0.1}}, "the SDPO paper's own loss"),
        ({"sdpo": {"weight": 0.1, "jsd_beta": 2.0}}, "must be at least 0 and at most 1"),
        ({"sdpo": {"weight": 0.1, "token_clip": 0.0}}, "token_clip = 0.0 must be greater than 0"),
        ({"loop": "supervised", "model": "tiny"}, "Set inner.data.text"),
        ({"loop": "supervised", "model": "tiny", "data": {"text": "a.pdf"}}, ".txt, .npy or .bin"),
        ({"loop": "supervised", "data": {"text": "a.txt"}}, 'inner.model = "tiny"'),
        (
            {"loop": "supervised", "model": "tiny", "data": {"text": "a.txt"}, "sdpo": {"weight": 0.1}},
            "has no rollouts",
        ),
    ],
)
def test_contradictions_are_refused_with_the_next_step(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InnerError, match=words):
        InnerConfig(**settings)


def test_what_is_allowed() -> None:
    InnerConfig(sdpo={"weight": 1.0, "teacher": "frozen"})
    InnerConfig(**OWN, sdpo={"weight": 0.1, "context": "rollout"})  # siblings' successes need no tools
    InnerConfig(**OWN, sdpo={"weight": 0.1}, sampling={"environment": "e.py:E"})
    assert InnerConfig(**OWN).learning_rate == 1e-6 and InnerConfig().learning_rate == 1e-3
    assert (
        InnerConfig(gradient_accumulation_steps=2, grpo={"steps_per_generation": 4, "num_iterations": 2}).boundary == 4
    )


def test_seeds_are_not_negative() -> None:
    with pytest.raises(InnerError, match=r"Seeds\.start"):
        Seeds(data=0, noise=0, start=-1)


def reward_file(folder: Path, body: str) -> dict[str, Path]:
    (folder / "r.py").write_text(body)
    (folder / "p.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n')
    return {"reward": folder / "r.py", "prompts": folder / "p.jsonl"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "import nothing_here\ndef f(completions, **c): return []\n",
            r"r\.py, line 1: import nothing_here[\s\S]*No module",
        ),
        ("def f(completions, **c)\n", r"SyntaxError[\s\S]*next: correct the line"),
        ("def g(completions, **c): return []\n", "defines no 'f'; it defines g"),
        ("f = 3\n", "f is a int"),
        ("def f(completions, **c):\n    return [1.0]\n", r"r\.py:f returned 1 values for 2"),
        ("def f(completions, **c):\n    return [1.0, float('nan')]\n", r"returned nan for completion 1"),
        ("def f(completions, **c):\n    return ['1', '2']\n", r"returned '1' for completion 0"),
        ("def f(completions, **c):\n    return 1.0\n", "returned a float"),
        ("async def f(completions, **c):\n    return [1.0]\n", r"r\.py:f returned 1 values for 2"),
        ("def f(completions, **c):\n    return [c['truth'] for _ in completions]\n", r"line 2: return.*\n.*KeyError"),
        ("def f(completions, **c):\n    return [len(x[-1]['content']) for x in completions]\n", "are texts here"),
    ],
)
def test_check_shows_what_is_wrong_with_a_reward(tmp_path: Path, body: str, words: str) -> None:
    with pytest.raises(InnerError, match=words):
        check_inner(InnerConfig(**OWN), reward_file(tmp_path, body))


@pytest.mark.parametrize(
    "body",
    ["import threading\nthreading.Event().wait()\n", "import threading\ndef f(**c):\n    threading.Event().wait()\n"],
)
def test_a_check_ends_although_the_users_code_does_not(tmp_path: Path, body: str, capsys) -> None:
    """Before: a reward that waited for ever kept the run's model from being published, without a word."""
    check_inner(InnerConfig(**OWN), reward_file(tmp_path, body), limit_s=0.05)
    assert "not checked: trying the run's code took longer than 0.05 s" in capsys.readouterr().err


def test_a_worker_process_of_a_reward_can_import_the_runs_copy_of_its_file(tmp_path: Path, monkeypatch) -> None:
    """Before: the workers of a spawned Pool failed one after the other, and the call waited for ever."""
    body = "def worth(text):\n    return float(len(text))\ndef f(completions, **c):\n    return []\n"
    files = {kind: Path(path) for kind, path in copy_files(reward_file(tmp_path, body), tmp_path).items()}
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = load_module("reward", "r.py:f", files)
    worker = "import pickle, sys; sys.path = eval(sys.argv[1]); print(pickle.loads(bytes.fromhex(sys.argv[2]))('abc'))"
    words = [sys.executable, "-c", worker, repr(sys.path), pickle.dumps(module.worth).hex()]
    assert subprocess.run(words, capture_output=True, text=True, check=True, cwd="/").stdout == "3.0\n"


def test_a_reward_for_texts_that_is_asked_about_chats_is_told_where_the_text_is(tmp_path: Path) -> None:
    files = reward_file(tmp_path, "def f(completions, **c):\n    return [len(x.strip()) for x in completions]\n")
    chat = '{"prompt": [{"role": "user", "content": "a"}]}\n'
    files["prompts"].write_text(chat * 2)
    with pytest.raises(InnerError, match=r'a list of messages here.*\[completion\[-1\]\["content"\] for'):
        check_inner(InnerConfig(**OWN), files)


def test_check_accepts_a_good_reward(tmp_path: Path) -> None:
    body = (
        "def f(completions, answer, log_metric, **c):\n    return [float(x == y) for x, y in zip(completions, answer)]"
    )
    check_inner(InnerConfig(**OWN), reward_file(tmp_path, body))
    check_inner(InnerConfig(**OWN), reward_file(tmp_path, "async def f(completions, **c):\n    return [1.0, 1.0]\n"))
    none = "def f(completions, **c):\n    return [None, 1]\n"  # None: "cannot say", as in TRL
    check_inner(InnerConfig(**OWN), reward_file(tmp_path, none))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "is empty"),
        ('{"prompt": "a"}\nnot json\n', "line 2 is not JSON"),
        ('{"question": "a"}\n', "line 1 has no `prompt`"),
    ],
)
def test_check_shows_what_is_wrong_with_prompts(tmp_path: Path, lines: str, words: str) -> None:
    files = reward_file(tmp_path, "def f(completions, **c): return [0.0] * len(completions)\n")
    files["prompts"].write_text(lines)
    with pytest.raises(InnerError, match=words):
        check_inner(InnerConfig(**OWN), files)


def test_check_wants_the_local_copy(tmp_path: Path) -> None:
    with pytest.raises(InnerError, match="no local copy was handed in"):
        check_inner(InnerConfig(**OWN), {})
    with pytest.raises(InnerError, match="there is no file"):
        check_inner(InnerConfig(**OWN), {"prompts": tmp_path / "none.jsonl"})
    with pytest.raises(InnerError, match="names no object"):
        check_inner(InnerConfig(rewards={"function": "r.py"}), reward_file(tmp_path, ""))


BODY = "class E:\n    def reset(self, **row): pass\n    def get_reward(self): return 1.0\n"
TOOL = """
    def go(self, a: int) -> int:
        '''Go.

        Args:
            a: far
        '''
        return a
"""


def with_environment(folder: Path, body: str, **sdpo: Any) -> tuple[InnerConfig, dict[str, Path]]:
    (folder / "e.py").write_text(body)
    config = InnerConfig(**{**OWN, "rewards": {"function": None}}, sampling={"environment": "e.py:E"}, **sdpo)
    return config, {**reward_file(folder, ""), "environment": folder / "e.py"}


def test_only_a_hint_needs_a_tool_that_can_fail(tmp_path: Path) -> None:
    check_inner(*with_environment(tmp_path, BODY, sdpo={"weight": 0.1, "context": "rollout"}))
    later = {"sdpo": {"weight_end": 0.1}, "schedule": {"weight_steps": 3}}
    with pytest.raises(InnerError, match="no public method"):
        check_inner(*with_environment(tmp_path, BODY, **later))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("class E:\n    pass\n", "no `reset"),
        ("class E:\n    def __init__(self): open('/nowhere/x')\n", r"cannot be built[\s\S]*line 2[\s\S]*FileNotFound"),
        ("class E:\n    def reset(self, **row): pass\n", "no `get_reward`"),
        ("class E:\n    async def reset(self, **row): pass\n", "`reset` is async, and nothing awaits it"),
        ("class E:\n    @property\n    def reset(self): pass\n", r"`reset` is a property.* `def reset\(self, \*\*row"),
        (BODY + "    get_reward = classmethod(len)\n", r"`get_reward` is a classmethod.* `def get_reward\(self\)`"),
        (BODY, "no public method"),
        (BODY + "    def go(self, a): return a\n", "tool go cannot be described"),
        (BODY + "    def go(self, a: int):\n        yield a\n", "tool go has a `yield`, so a call would return a gen"),
        (BODY + "    async def go(self, a: int):\n        yield a\n", "tool go has a `yield`"),
        (BODY + "    def go(self, *a: int): return a\n", "tool go takes arguments without names"),
        (BODY + "    def go(self, a: int, /): return a\n", "tool go takes arguments without names"),
        (BODY + TOOL, None),
    ],
)
def test_check_looks_at_the_environment(tmp_path: Path, body: str, words: str | None) -> None:
    config, files = with_environment(tmp_path, body, sdpo={"weight": 0.1})
    if words is None:
        check_inner(config, files)
    else:
        with pytest.raises(InnerError, match=words):
            check_inner(config, files)


def test_a_method_that_is_no_tool_is_named(tmp_path: Path) -> None:
    """TRL leaves out all that is not a function: the model called a tool that was not there, in every rollout."""
    body = "import functools\n" + BODY + "    @functools.lru_cache\n" + TOOL.lstrip("\n")
    found = rehearse(*with_environment(tmp_path, body), 60.0)
    assert found.refused == "" and "the model does not get go (a lru_cache_wrapper) as a tool" in found.warning
    assert rehearse(*with_environment(tmp_path, body.replace("    @functools.lru_cache\n", "")), 60.0).warning == ""


@pytest.mark.parametrize(
    "only_logged", [{"rewards": {"functions": {"r.py:f": 0.0}}}, {"trl": {"reward_weights": [0.0]}}]
)
def test_an_environment_beside_a_reward_that_is_only_logged_has_one_of_its_own(
    tmp_path: Path, only_logged: dict[str, Any]
) -> None:
    files = {**reward_file(tmp_path, "def f(completions, **row): return [0.0] * len(completions)\n")}
    (tmp_path / "e.py").write_text("class E:\n    def reset(self, **row): pass\n")
    rewards = {"rewards": {"function": "r.py:f"}} if "trl" in only_logged else {}
    config = InnerConfig(**{**OWN, **rewards, **only_logged}, sampling={"environment": "e.py:E"})
    with pytest.raises(InnerError, match="has no `get_reward`, and no other reward counts"):
        check_inner(config, {**files, "environment": tmp_path / "e.py"})


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_inner_imports_neither_torch_nor_trl() -> None:
    code = (
        "import inner, sys; inner.InnerConfig(); inner.check_inner; print(sorted({'torch', 'trl'} & set(sys.modules)))"
    )
    assert run_python(code) == "[]"
    assert run_python("import inner; print(sorted(inner.__all__) == sorted(inner._HOME))") == "True"


@pytest.mark.slow
def test_without_trl_everything_else_works() -> None:
    code = """
import sys
sys.modules["trl"] = None
from inner import ComposerReplicationTrainer, SupervisedLoop, ToolWorld, compose_loss
class Mine(ComposerReplicationTrainer): pass
for made in (ComposerReplicationTrainer, Mine):
    try: made(model=None)
    except ImportError as error: print(error)
assert not any(name.startswith("trl.") for name in sys.modules)
"""
    said = "ComposerReplicationTrainer needs trl: pip install 'serverless-diloco[train]'"
    assert run_python(code) == f"{said}\n{said}"


def test_every_public_name_is_there() -> None:
    import inner

    for name in inner.__all__:
        assert getattr(inner, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = inner.nope

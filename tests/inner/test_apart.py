"""The user's code runs apart from training: what it does to its process is undone after each call, and told once."""

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inner.settings.inner import InnerConfig, Seeds
from inner.train.build import build_inner
from inner.train.task_files import load_files
from inner.usercode.apart import _PROCESS, _read_autocast, apart, keep_apart, own_numbers_kept, take_notes
from inner.usercode.reward_calls import RewardCalls, StandaloneHost
from tests.inner.test_toolworld import WORLD, small_folder

HERE, FILE = Path(__file__), Path("r.py")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"own": None, "notes": [], "told": set()}.items():
        monkeypatch.setattr(_PROCESS, name, value)


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def plain(completions: Any, **columns: Any) -> list[float]:
    return [0.0 for _ in completions]


def seeds(completions: Any, **columns: Any) -> list[float]:
    seed_all(0)
    return [torch.rand(()).item() for _ in completions]


def rude(completions: Any, **columns: Any) -> list[float]:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.set_default_device("meta")
    torch.set_num_threads(torch.get_num_threads() + 1)
    os.chdir("/")
    return [0.0 for _ in completions]


@pytest.mark.parametrize("reward", [plain, seeds, lambda completions, **columns: [draws()[0]]])
def test_training_draws_the_same_numbers_whatever_a_reward_does(reward: Any) -> None:
    seed_all(7)
    expected = [draws() for _ in range(4)]
    seed_all(7)
    found = []
    for _ in range(4):
        found.append(draws())
        keep_apart(reward, FILE)(completions=[""])
    assert found == expected


def test_a_reward_draws_other_numbers_in_each_call_and_the_same_after_its_own_seed() -> None:
    noisy = keep_apart(lambda completions, **columns: draws(), FILE)
    assert len({noisy(completions=[""]) for _ in range(3)}) == 3
    seeded = keep_apart(seeds, FILE)
    assert seeded(completions=[""]) == seeded(completions=[""])


def test_settings_and_the_folder_are_as_before_also_after_an_error() -> None:
    def fails(completions: Any, **columns: Any) -> None:
        rude(completions)
        raise ValueError("after all that")

    def all_settings() -> tuple[Any, ...]:
        threads, device = torch.get_num_threads(), torch.get_default_device()
        exact = torch.are_deterministic_algorithms_enabled()
        return torch.is_grad_enabled(), torch.get_default_dtype(), device, threads, exact, os.getcwd()

    before = all_settings()
    keep_apart(rude, FILE)(completions=[""])
    assert all_settings() == before
    with pytest.raises(ValueError, match="after all that"):
        keep_apart(fails, FILE)(completions=[""])
    assert all_settings() == before


def opens_autocast() -> None:
    torch.autocast("cpu", dtype=torch.float16).__enter__()


def closes_stdout() -> None:
    sys.stdout = None  # type: ignore[assignment]


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "torch.autocast": (
        opens_autocast,
        lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), _read_autocast(torch)[0]),
    ),
    "torch.autograd.set_detect_anomaly": (
        lambda: torch.autograd.set_detect_anomaly(not torch.is_anomaly_enabled()),
        torch.is_anomaly_enabled,
    ),
    "numpy.seterr": (lambda: np.seterr(all="raise"), np.geterr),
    "warnings.simplefilter": (lambda: warnings.simplefilter("error"), lambda: list(warnings.filters)),
    "signal.signal": (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), lambda: signal.getsignal(signal.SIGTERM)),
    "sys.setrecursionlimit": (lambda: sys.setrecursionlimit(10**6), sys.getrecursionlimit),
    "sys.stdout or sys.stderr": (closes_stdout, lambda: sys.stdout),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_process_is_undone_and_told(name: str) -> None:
    """`simplefilter("error")` ended the session at a library's next warning; autocast stayed on in the training."""
    change, state = CHANGES[name]
    before = state()
    keep_apart(lambda completions: change() and None, FILE)(completions=[""])
    assert state() == before
    assert [f" calls {name}, which" in note for note in take_notes()] == [True]


def test_filters_that_only_hide_warnings_stay() -> None:
    with warnings.catch_warnings():
        keep_apart(lambda completions: warnings.filterwarnings("ignore", "of my library"), FILE)(completions=[""])
        assert "of my library" in str(warnings.filters[0])
    assert take_notes() == []


def test_os_exit_of_a_reward_is_an_error_of_the_reward_and_a_forked_child_still_ends() -> None:
    """As the replica's own exit code, 2 ended the whole run with "its configuration, files or model are wrong"."""
    real = os._exit
    with pytest.raises(SystemExit, match="2"):
        keep_apart(lambda completions: os._exit(2), FILE)(completions=[""])
    assert os._exit is real

    def forks(completions: Any) -> int:
        if (child := os.fork()) == 0:
            os._exit(5)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert keep_apart(forks, FILE)(completions=[""]) == 5


def test_async_rewards_that_overlap_leave_the_trainers_state() -> None:
    async def late(completions: Any, **columns: Any) -> list[float]:
        seed_all(1)
        torch.set_default_dtype(torch.float64)
        await asyncio.sleep(0.01 * columns["n"])
        return [torch.rand(()).item()]

    async def both() -> None:
        await asyncio.gather(*(keep_apart(late, FILE)(completions=[""], n=n) for n in (2, 1)))

    seed_all(7)
    expected = draws()
    seed_all(7)
    asyncio.run(both())
    assert draws() == expected
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("wrap", ["decorated", "partial", "lambda"])
def test_a_function_that_returns_a_coroutine_runs_apart_too(wrap: str) -> None:
    async def score(completions: Any, **columns: Any) -> list[float]:
        seed_all(1)
        await asyncio.sleep(0)
        return rude(completions)

    def decorated(completions: Any, **columns: Any) -> Any:
        return score(completions, **columns)

    forms = {"decorated": decorated, "partial": partial(decorated, more=1), "lambda": lambda c, **columns: score(c)}
    seed_all(7)
    expected, here = draws(), os.getcwd()
    seed_all(7)
    reward = keep_apart(forms[wrap], FILE)
    assert asyncio.run(reward(["a"])) == [0.0]
    assert draws() == expected and os.getcwd() == here
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32


def test_a_second_session_in_one_process_draws_what_its_own_process_would(tmp_path: Path) -> None:
    """`verify --inner` takes the inner steps of all sessions in one process."""
    (tmp_path / "r.py").write_text("import random\n\ndef score(completions, **_):\n    return [random.random()]\n")
    config = InnerConfig(model="toolworld", rewards={"function": "r.py:score"})
    drawn = []
    for _ in range(2):
        (score,) = load_files(config, {"reward": tmp_path / "r.py"}, models=True)["rewards"]
        seed_all(5)
        drawn.append([score(["a"])[0] for _ in range(3)])
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 3


def test_an_evaluation_leaves_the_rewards_random_numbers_as_they_were() -> None:
    """`verify --inner` takes no evaluation again, and accused every replica that had one."""
    score = keep_apart(lambda completions, **_: draws(), FILE)
    seed_all(7)
    expected = [score(["a"]) for _ in range(3)]
    _PROCESS.own = None
    seed_all(7)
    found = [score(["a"])]
    with own_numbers_kept():
        assert score(["held out"]) != expected[1]
    assert [*found, score(["a"]), score(["a"])] == expected


def test_a_change_is_told_once_as_a_warning_that_names_the_reward() -> None:
    told: list[str] = []

    class Host(StandaloneHost):
        def emit(self, event: str, text: str, **fields: Any) -> None:
            told.append(f"{event} {text}")

    calls = RewardCalls(retries=0, timeout_s=0, group=1, clock=lambda: 0.0, host=Host())
    for reward in (seeds, rude, plain):
        wrapped = calls.wrap_reward(keep_apart(reward, FILE))
        assert [len(wrapped(completions=["", ""])) for _ in range(2)] == [2, 2]
    assert [text.partition(", which")[0] for text in told] == [
        "warning r.py:seeds calls torch.manual_seed",
        "warning r.py:rude calls torch.set_grad_enabled, torch.set_default_dtype, torch.set_default_device, "
        "torch.set_num_threads, torch.use_deterministic_algorithms, os.chdir",
    ]


def test_a_file_that_is_loaded_reads_no_arguments_of_ours_and_seeds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["trial.py", '{"inner": 1}'])
    seed_all(7)
    expected = draws()
    seed_all(7)
    with apart(FILE, "r.py"):
        seed_all(0)
        parser = argparse.ArgumentParser()
        parser.add_argument("--w", type=float, default=1.0)
        assert parser.parse_args().w == 1.0
    assert draws() == expected
    assert take_notes()[0].startswith("r.py calls torch.manual_seed")
    assert _PROCESS.own is None


def test_names_and_kinds_stay_those_that_trl_reads() -> None:
    from functools import partial

    from trl.trainer.utils import get_callable_name, is_async_callable

    class Scorer:
        async def __call__(self, completions: Any, **columns: Any) -> list[float]:
            return [0.0]

    async def later(completions: Any, **columns: Any) -> list[float]:
        return [0.0]

    for reward in (plain, later, Scorer(), partial(plain, w=1), partial(later, w=1)):
        kept = keep_apart(reward, FILE)
        assert get_callable_name(kept) == get_callable_name(reward)
        assert is_async_callable(kept) == is_async_callable(reward)
    model = torch.nn.Linear(1, 1)
    assert keep_apart(model, FILE) is model


def test_a_call_costs_little() -> None:
    """Counts the states that are read, instead of seconds: once before and once after a call."""
    read: list[str] = []
    kept = keep_apart(plain, FILE)
    original = torch.get_rng_state
    torch.get_rng_state = lambda: read.append("") or original()  # type: ignore[assignment]
    try:
        kept(completions=[""])
    finally:
        torch.get_rng_state = original
    assert len(read) == 2


@pytest.mark.slow
def test_a_torch_that_the_code_itself_imports_is_watched_too(tmp_path: Path) -> None:
    told = """
import sys
from pathlib import Path
from inner.usercode.apart import keep_apart, take_notes
def score(completions):
    import torch
    torch.manual_seed(0), torch.set_grad_enabled(False)
assert "torch" not in sys.modules
keep_apart(score, Path("r.py"))(completions=[])
assert sys.modules["torch"].is_grad_enabled()
print(*take_notes())
"""
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, cwd=HERE.parents[2])
    assert done.stdout.startswith("r.py:score calls torch.set_grad_enabled,"), done.stderr


SEEDING = f'''
import random

import numpy as np
import torch


class Env:
    """Each method seeds everything, as in many environments."""

    def __init__(self):
        self._seed()

    def _seed(self):
        torch.manual_seed(11)
        np.random.seed(11)
        random.seed(11)
        torch.set_default_dtype(torch.float64)

    def reset(self, **row):
        self._seed()
        self.calls = 0

    def {WORLD.right_name(0)}(self, a: int, b: int) -> str:
        """The tool.

        Args:
            a: first
            b: second
        """
        self._seed()
        self.calls += 1
        return str((a + b) % 20)

    def get_reward(self):
        self._seed()
        return float(self.calls)
'''


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_an_environment_that_seeds_everything_does_not_reach_the_training(tmp_path: Path, workers: int) -> None:
    """Its `torch.manual_seed` made the random numbers of all generations equal."""
    calm = generations(tmp_path / "calm", SEEDING.replace("self._seed()", "pass"), workers)
    assert not take_notes()
    rude = generations(tmp_path / "rude", SEEDING, workers)
    assert len(rude) > 3 and rude == calm
    assert torch.get_default_dtype() == torch.float32
    of_load, of_turns = take_notes()
    assert "env.py calls torch.manual_seed, torch.set_default_dtype" in of_load
    assert "env.py:Env (or a reward beside it) calls torch.manual_seed" in of_turns


def generations(folder: Path, environment: str, workers: int) -> list[Any]:
    """Return the tokens that each turn of the model sampled in three inner steps."""
    folder.mkdir()
    (folder / "env.py").write_text(environment)
    (folder / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "op0 3 4"}]}\n' * 4)
    sampling = {"environment": "env.py:Env", "tool_workers": workers}
    config = InnerConfig(model=str(small_folder()), data={"prompts": "rows.jsonl"}, sampling=sampling, batch_size=16)
    files = {"prompts": folder / "rows.jsonl", "environment": folder / "env.py"}
    torch.manual_seed(3)
    loop: Any = build_inner(config, small_folder(), files, Seeds(data=0, noise=0))
    seen, sample = [], loop.trainer._generate_single_turn

    def generate(*args: Any, **kwargs: Any) -> Any:
        out = sample(*args, **kwargs)
        seen.append(out[0])
        return out

    loop.trainer._generate_single_turn = generate
    left = iter([False] * 3 + [True])
    loop.train(lambda: next(left))
    return seen


HINTS = ("hint = _seed", "hint = functools.partial(_seed)", "hint = functools.cache(_seed)", "hint = Hint()")


@pytest.mark.parametrize("line", HINTS)
def test_a_hint_of_any_kind_runs_apart(tmp_path: Path, line: str) -> None:
    """A partial or an object was called as it is, so its seed reached the training."""
    (tmp_path / "env.py").write_text(
        f"import functools\nimport torch\n{SEEDING}\n"
        "def _seed(told):\n    torch.manual_seed(11)\n    torch.set_default_dtype(torch.float64)\n    return told\n"
        f"class Hint:\n    def __call__(self, told):\n        return _seed(told)\n{line}\n"
    )
    config = InnerConfig(model="toolworld", sampling={"environment": "env.py:Env"})
    hint = load_files(config, {"environment": tmp_path / "env.py"}, models=True)["hint"]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert hint("x") == "x"
    assert torch.equal(torch.get_rng_state(), before) and torch.get_default_dtype() == torch.float32
    assert any("env.py" in note for note in take_notes())


def test_a_hint_that_asks_for_a_batch_at_once_goes_on_to(tmp_path: Path) -> None:
    """An LLM's hints were asked one by one."""
    (tmp_path / "env.py").write_text(
        f"import torch\n{SEEDING}\nclass Hint:\n    def __call__(self, row, error):\n        return 'one'\n"
        "    def prepare(self, asked):\n        torch.manual_seed(11)\n        self.asked = asked\nhint = Hint()\n"
    )
    config = InnerConfig(model="toolworld", sampling={"environment": "env.py:Env"})
    hint = load_files(config, {"environment": tmp_path / "env.py"}, models=True)["hint"]
    before = torch.get_rng_state()
    hint.prepare(["a", "b"])
    assert torch.equal(torch.get_rng_state(), before) and hint({}, "x") == "one"

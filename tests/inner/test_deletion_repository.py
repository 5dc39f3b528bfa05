"""A repository with passing tests becomes tasks: traced, taken out, judged outside; in the real sandbox."""

import compileall
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from inner.errors import InnerError, SandboxMissing
from inner.extras.deletion import repository
from inner.extras.deletion.generate import check_task, main, prompt_row
from inner.extras.deletion.harbor import read_harbor, write_harbor
from inner.extras.deletion.judge import DeletionTask, judge, load_task
from inner.extras.deletion.repository import Repository, make_repository_tasks, propose, read_repository, run_all
from inner.extras.deletion.world import FeatureDeletion
from tests.inner.test_deletion_verdicts import PYTHON, asked, harbor_said
from tests.support.deletion_cheats import CHEATS

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not here: apt-get install bubblewrap")
FILES = {
    "shop/__init__.py": "from shop.prices import Basket, price\n",
    "shop/prices.py": '''"""Prices."""


def price(item, count=1):
    """Return the price of some items, in cents; from ten on, a tenth is free."""
    if count < 0:
        raise ValueError("a negative count")
    whole = 7 * len(item) * count
    return whole - whole // 10 if count >= 10 else whole


class Basket:
    def __init__(self):
        self.lines = []

    def add(self, item, count=1):
        """Add items; return the basket."""
        self.lines.append((item, count))
        self.lines.sort()
        return self
''',
    "shop/rates.txt": "7\n",
    "shop/old.py": "print 'Python 2'\n",
    "tests/test_old.py": "print 'Python 2'\n",
    "shop/names.py": """def title(name):
    words = name.split("_")
    words = [word.capitalize() for word in words]
    return " ".join(words)


def check(name):
    if name == "":
        raise ValueError("no name")
    return name.isidentifier()


def unused(name):
    a = 1
    b = 2
    return name * a * b
""",
    "tests/conftest.py": """import pytest


@pytest.fixture
def basket():
    from shop import Basket
    return Basket()
""",
    "tests/test_shop.py": """import pytest
from shop import price
from shop.names import check, title


@pytest.mark.parametrize("item, count, cents", [("tea", 1, 21), ("tea", 20, 378), ("coffee", 3, 126)])
def test_price(item, count, cents):
    assert price(item, count) == cents


def test_negative():
    with pytest.raises(ValueError):
        price("tea", -1)


def test_basket(basket, tmp_path):
    (tmp_path / "x").write_text("x")
    assert basket.add("tea").add("coffee", 2).lines == [("coffee", 2), ("tea", 1)]


def test_title():
    assert title("green_tea") == "Green Tea"


def test_checked():
    title_of = title if check("green_tea") is not False else str
    assert title_of("red_tea") == "Red Tea"


def test_guessable():
    assert title("") == ""


def test_fails():
    assert title("a") == "b"
""",
}


@pytest.fixture(scope="module")
def packages() -> Iterator[Path]:
    """A folder with pytest and what it needs, that any user may read."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
            spec = find_spec(name)
            assert spec is not None and spec.origin is not None
            shutil.copytree(Path(spec.origin).parent, Path(folder, name), ignore=shutil.ignore_patterns("*.pyc"))
        shutil.copyfile(Path(pytest.__file__).parents[1] / "py.py", Path(folder, "py.py"))
        compileall.compile_dir(folder, quiet=2)
        yield Path(folder)


def written(folder: Path, **more: str) -> Path:
    for path, text in {**FILES, **more}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture(scope="module")
def shop(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return read_repository(written(tmp_path_factory.mktemp("r") / "shop"), "pytest", packages)


@pytest.fixture(scope="module")
def tasks(shop: Repository) -> dict[str, DeletionTask]:
    return {task.name: task for task in make_repository_tasks(shop, docstrings=True, seed=0)}


@pytest.mark.slow
def test_the_traced_run_says_which_test_reaches_what(shop: Repository) -> None:
    reached = {test.key[2]: test.reached for test in shop.tests}
    assert set(reached) == {
        "test_price",
        "test_negative",
        "test_basket",
        "test_title",
        "test_checked",
        "test_guessable",
    }
    assert "shop/names.py:title" in reached["test_title"] and "shop/prices.py:price" not in reached["test_title"]
    assert reached["test_basket"] == {"shop/prices.py:Basket.__init__", "shop/prices.py:Basket.add"}
    assert "tests/test_shop.py" not in shop.code and "shop/rates.txt" in shop.code
    assert {d.name for d in propose(shop, 0)} == {
        "shop.prices.price", "shop.prices.Basket.add", "shop.prices",
        "shop.names.title", "shop.names.check", "shop.names",
    }  # fmt: skip


@pytest.mark.slow
def test_a_function_a_method_and_a_module_are_tasks(tasks: dict[str, DeletionTask]) -> None:
    assert set(tasks) == {
        f"shop-{n}"
        for n in ("shop.prices.price", "shop.prices.Basket.add", "shop.prices", "shop.names.title", "shop.names")
    }, "without check, its test passes if it returns None"
    title = tasks["shop-shop.names.title"]
    assert title.fail_to_pass == [f"tests/test_shop.py::{name}[0]" for name in ("test_checked", "test_title")]
    assert "tests/test_shop.py::test_guessable[0]" not in title.fail_to_pass, "a value that can be guessed"
    assert len(tasks["shop-shop.prices"].fail_to_pass) == 3 and list(tasks["shop-shop.prices"].solution) == [
        "shop/prices.py"
    ]
    assert "Add items; return the basket." in tasks["shop-shop.prices.Basket.add"].instruction
    assert "Add items" not in tasks["shop-shop.prices.Basket.add"].files["shop/prices.py"]


@pytest.mark.slow
def test_no_expected_value_is_in_what_a_sandbox_gets(tasks: dict[str, DeletionTask]) -> None:
    for task in tasks.values():
        inside = json.dumps([task.files, dict(task.around.beside), [test.run for test in task.tests]])
        for answer in ("378", "126", "Green Tea", '(\\"coffee\\", 2), (\\"tea\\", 1)'):
            assert answer not in inside, task.name


@pytest.mark.slow
def test_the_environment_gives_the_solution_1_and_another_one_0(tasks: dict[str, DeletionTask]) -> None:
    task = tasks["shop-shop.prices.price"]
    check_task(task)
    right = task.solution["shop/prices.py"]
    assert asked(task, {"shop/prices.py": right.replace("7 * len(item) * count", "len(item) * count * 7")}) == 1.0
    verdict = judge(task, {**task.files, "shop/prices.py": right.replace("count >= 10", "count >= 30")})
    assert verdict.reward == 0.0 and verdict.share(task) == 1 / 2


@pytest.mark.slow
def test_the_agent_may_import_the_packages(tasks: dict[str, DeletionTask]) -> None:
    world = FeatureDeletion()
    world.reset(prompt_row(tasks["shop-shop.names.title"])["task"])
    assert world.run_python("import pytest, shop.prices, os\nprint(os.listdir('/work'))") == "['shop']\n"


@pytest.mark.slow
@pytest.mark.slow
def test_ten_kinds_of_cheating_score_0(tasks: dict[str, DeletionTask]) -> None:
    for task in tasks.values():
        for kind, cheat in CHEATS.items():
            assert asked(task, cheat(task)) == 0.0, (task.name, kind)


@pytest.mark.skipif(PYTHON is None or sys.version_info[:2] != (3, 11), reason="no python3.11 for another user")
@pytest.mark.slow
def test_harbors_judge_agrees(tasks: dict[str, DeletionTask], packages: Path) -> None:
    task = tasks["shop-shop.prices.price"]
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        place = Path(folder, "task")
        assert harbor_said(place, task, task.solution, packages=packages) == 1.0
        assert harbor_said(place, task, {}, packages=packages) == 0.0
        assert "pip install --no-deps --target /packages" in (place / "environment/Dockerfile").read_text()


@pytest.mark.slow
def test_a_row_has_its_surroundings_and_missing_packages_are_named(
    tasks: dict[str, DeletionTask], tmp_path: Path
) -> None:
    task = load_task(tasks["shop-shop.names.title"].dump())
    assert task.around == replace(tasks["shop-shop.names.title"].around)
    write_harbor(task, tmp_path / task.name)
    assert read_harbor(tmp_path / task.name, task.around.packages).dump() == task.dump()
    gone = replace(task, around=replace(task.around, packages="/not/here", requires=["pytest==9"]))
    with pytest.raises(
        SandboxMissing, match=r"no folder /not/here.*pip install --no-deps --target /not/here pytest==9"
    ):
        judge(gone, gone.files)


@pytest.mark.parametrize(
    ("tests", "change", "why"),
    [
        ("nose tests", {}, "--tests must be `pytest` with its options"),
        ("pytest -k nothing_of_this_name", {}, "no test of the suite passed in the sandbox: pytest found none"),
        ("pytest", {"tests/conftest.py": "import not_here_at_all\n"}, "passed .*: .*No module named 'not_here_at_all'"),
    ],
)
def test_a_suite_that_cannot_be_used_is_refused(
    tests: str, change: dict[str, str], why: str, packages: Path, tmp_path: Path
) -> None:
    with pytest.raises(InnerError, match=why):
        read_repository(written(tmp_path, **change), tests, packages)


@pytest.mark.parametrize(
    ("addopts", "prices"),
    [
        ("-x --doctest-modules -k 'not tea-1-21 and not guessable'", [1, 2]),  # click leaves out 31,000 of 33,000 by -m
        ("--cov=shop -n 4", [0, 1, 2]),  # plugins that are not here
    ],
)
@pytest.mark.slow
def test_the_suites_own_options_count(addopts: str, prices: list[int], packages: Path, tmp_path: Path) -> None:
    documented = FILES["shop/names.py"].replace("(name):\n", '(name):\n    """>>> title("a")\n    \'A\'"""\n', 1)
    folder = written(tmp_path, **{"pytest.ini": f"[pytest]\naddopts = {addopts}\n", "shop/names.py": documented})
    found = read_repository(folder, "pytest", packages)
    assert sorted(test.key[3] for test in found.tests if test.key[2] == "test_price") == prices
    assert not run_all(found.code, found.tests, found.around), "each is found again alone, by its number"


def test_a_test_may_import_a_helper_beside_it(packages: Path, tmp_path: Path) -> None:
    helped = {
        "tests/common.py": "def three(f, x):\n    return [f(x)] * 3\n",
        "tests/test_help.py": "from common import three\nfrom shop import price\n\n"
        "def test_help():\n    assert three(price, 'tea') == [21, 21, 21]\n",
    }
    found = read_repository(written(tmp_path, **helped), "pytest tests/test_help.py", packages)
    assert [test.key[2] for test in found.tests] == ["test_help"]
    assert found.tests[0].reached == {"shop/prices.py:price"}, "the suite's own functions are no code to take out"
    assert not run_all(found.code, found.tests, found.around)


def test_a_file_that_no_agent_may_write_is_not_proposed(shop: Repository) -> None:
    large = {path: text + "# long\n" * 30_000 * (path == "shop/names.py") for path, text in shop.code.items()}
    assert {d.path for d in propose(replace(shop, code=large), 0)} == {"shop/prices.py"}


@pytest.mark.slow
def test_a_suite_that_waits_for_ever_is_told(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "TRACED", replace(repository.TRACED, seconds=2))
    waits = {"tests/test_waits.py": "import time\n\ndef test_waits():\n    time.sleep(60)\n"}
    with pytest.raises(InnerError, match=r"took more than 2 s\. Name a part of it"):
        read_repository(written(tmp_path, **waits), "pytest", packages)


def test_a_copy_of_the_repository_among_the_packages_is_refused(packages: Path, tmp_path: Path) -> None:
    shutil.copytree(packages, tmp_path / "packages")
    written(tmp_path / "packages" / "old")
    with pytest.raises(InnerError, match=r"is a copy of the repository's \w+\.py: the solution"):
        read_repository(written(tmp_path / "shop"), "pytest", tmp_path / "packages")


@pytest.mark.slow
def test_the_command_writes_prompts_and_says_what_it_passed_over(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--repo", str(written(tmp_path / "shop")), "--packages", str(packages), "--prompts", str(tmp_path / "p")]
    monkeypatch.setattr(sys, "argv", ["generate", *words, "--tests", "pytest tests -k title", "--most", "1"])
    (tmp_path / "p").write_text("rows of before")
    with pytest.raises(InnerError, match="no task could be made"):
        main()
    assert (tmp_path / "p").read_text() == "rows of before"
    assert "shop: 1 tests can be hidden" in capsys.readouterr().out, "test_guessable has no 'title' in its name"
    monkeypatch.setattr(sys, "argv", ["generate", *words, "--most", "1"])
    main()
    assert "the solution scores 1" in capsys.readouterr().out and (tmp_path / "p").read_text().count("\n") == 1

"""docs/configuration.md is what the dataclasses say, and each key has a sentence."""

import re
from dataclasses import dataclass, field

import pytest

from diloco.run.config import ConfigError, RunConfig
from executors.cli.checking.init import RUN
from inner.settings.flat_names import FLAT_NAMES, MOVED
from inner.settings.inner import InnerConfig, InnerError
from inner.settings.tables import Table, list_settings
from inner.settings.task import FILE_SETTINGS
from tests.support import reference


def test_the_page_is_what_the_code_says() -> None:
    page = reference.PAGE.read_text(encoding="utf-8")
    assert page == reference.reference_page(), "python -m tests.support.reference writes it anew"
    for name in list_settings(RunConfig):
        assert f"| `{name.rpartition('.')[2]}` |" in page


def test_the_first_runs_keys_are_those_that_init_writes() -> None:
    text = RUN.format(name="mine", model="owner/name", length=12)
    table, written = "", list[str]()
    for line in text.splitlines():
        if found := re.match(r"\[(.+?)\]", line):
            table = f"{found[1]}."
        elif found := re.match(r"(\w+) =", line):
            written.append(f"{table}{found[1]}")
    assert sorted(written) == sorted(reference.FIRST_RUN) and len(written) <= 16


def test_a_mark_names_a_setting_and_each_setting_has_one() -> None:
    known = {name for name, _ in reference.list_keys()}
    assert not set(reference.FIRST_RUN) & set(reference.TUNING) and {*reference.FIRST_RUN, *reference.TUNING} <= known
    marks = [reference.mark_of(name) for name in known]
    assert marks.count("first run") < marks.count("tuning") < marks.count("expert"), "most readers need few"


def test_every_key_has_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reference.missing_sentences() == []

    @dataclass(frozen=True)
    class Silent(Table):
        """A table."""

        key: int = 3

    @dataclass(frozen=True)
    class Run:
        name: str = field(default="x", metadata={"sentence": "A name."})
        silent: Silent = field(default_factory=Silent)

    monkeypatch.setattr(reference, "RunConfig", Run)
    assert reference.missing_sentences() == ["silent.key"]


ROOMS = ("executors", "diloco", "rendezvous", "inner")
SOURCE = "\n".join(p.read_text() for room in ROOMS for p in sorted((reference.PAGE.parents[1] / room).rglob("*.py")))


def is_read(setting: str) -> bool:
    """Whether some line of the source reads an attribute of this name."""
    return re.search(rf"\.{setting}\b(?!\s*=[^=])", SOURCE) is not None


def test_each_setting_is_read_by_some_line() -> None:
    """A setting that is declared and read nowhere was in run.json, the plan and the page, and changed nothing."""
    names = [name for name, _ in reference.list_keys()]
    assert [name for name in names if not is_read(name.rpartition(".")[2])] == []
    assert len(names) > 100 and not is_read("top_k_tokens"), "the search tells them apart"


def test_no_key_stands_twice_and_every_moved_one_has_a_place() -> None:
    known = list_settings(RunConfig)
    tables_known = {f"[{path}]" for path, _ in reference.list_tables(RunConfig)}
    assert {place.partition(" ")[0] for place in MOVED.values()} <= {*known, *tables_known}
    assert not set(MOVED) & set(known)
    assert {f"inner.{name}" for name in FILE_SETTINGS.values()} <= set(known)
    tables = [path for path, _ in reference.list_tables(RunConfig)]
    assert len(tables) == len(set(tables)) <= 17


@pytest.mark.parametrize("name", sorted(FLAT_NAMES))
def test_an_old_flat_key_is_refused_with_its_new_place(name: str) -> None:
    table, _, key = FLAT_NAMES[name].rpartition(".")
    with pytest.raises(InnerError) as said:
        InnerConfig.from_dict({name: 1})
    words = f"inner.{name} has moved: write {key} in the table [inner.{table}]"
    assert words in str(said.value)


def test_a_switch_that_became_a_table_is_refused_with_that_table() -> None:
    with pytest.raises(InnerError) as said:
        InnerConfig.from_dict({"sampling": {"vllm": True}})
    words = "inner.sampling.vllm has moved: write the table [inner.vllm], which turns vLLM on"
    assert str(said.value) == words
    with pytest.raises(InnerError, match=r"\[inner\.vllm\] must be a table, found True"):
        InnerConfig.from_dict({"vllm": True})


def test_of_two_warm_ups_one_is_left_and_the_other_is_refused_with_its_unit() -> None:
    with pytest.raises(
        ConfigError, match=r"write lr_warmup in the table \[inner\.schedule\].*which counts outer steps"
    ):
        RunConfig.from_dict({"inner": {"lr_warmup_steps": 8}})


@pytest.mark.parametrize(
    ("raw", "guess"),
    [
        ({"temprature": 1}, "inner.sampling.temperature"),
        ({"smapling": {}}, "inner.sampling"),
        ({"sampling": {"jsd_beta": 1}}, "inner.sdpo.jsd_beta"),
        ({"sampling": {"lr": 1}}, "inner.lr"),
        ({"sdpo": {"wieght": 1}}, "inner.sdpo.weight"),
        ({"alpha_sdp": 1}, "inner.sdpo.weight"),
        ({"lora": {"rank_": 1, "dropuot": 1}}, None),
        ({"lora": {"dropuot": 1}}, "inner.lora.dropout"),
    ],
)
def test_an_unknown_key_gets_the_nearest_of_all_tables(raw: dict, guess: str | None) -> None:
    with pytest.raises(InnerError) as said:
        InnerConfig.from_dict(raw)
    if guess is not None:
        assert re.search(rf"did you mean {re.escape(guess)}\?", str(said.value)), str(said.value)


def test_a_run_asks_its_outer_tables_too() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting inner\.sync_every; did you mean outer\.sync_every"):
        RunConfig.from_dict({"inner": {"sync_every": 3}})
    with pytest.raises(ConfigError, match=r"unknown setting fleet\.codec; did you mean outer\.codec"):
        RunConfig.from_dict({"fleet": {"codec": "int8"}})

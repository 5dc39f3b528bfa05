"""The documentation holds together: what can be checked without the builder of the site (`make docs`, strict too)."""

import importlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco import StoreManager, make_diloco
from diloco.run.config import RunConfig
from executors.platforms.base import ReplicaSpec
from executors.platforms.on_modal.executor import ModalExecutor
from executors.platforms.on_modal.kinds import memory_limit_mib
from inner.settings.tables import list_settings
from rendezvous import layout
from tests.support import choose_tables
from tests.support.command import verbs
from tests.support.site_pages import (
    DOCS,
    ROOT,
    all_pages,
    anchors_of,
    bucket_drawing,
    drawn_keys,
    is_within,
    key_shapes,
    links_of,
    names_of,
    nav_pages,
    quoted_errors,
    site_config,
    source_texts,
)

ROOMS = ("diloco", "executors", "inner", "rendezvous")
NOT_IN_NAV = ("internals/decisions/0", "internals/decisions/1")
PAGES, LINES = 25, 150
LONG = ("configuration.md", "formats.md", "benchmarks.md")  # to look things up, and what was measured
PRODUCT = [*sorted(DOCS.glob("*.md")), *sorted((DOCS / "reference").glob("*.md")), ROOT / "README.md"]
WORDS, PARAGRAPH, CELL = 60_000, 90, 70


def test_every_page_has_its_place_in_the_nav() -> None:
    listed = list(nav_pages(site_config()["nav"]))
    there = [str(p.relative_to(DOCS)) for p in all_pages() if DOCS in p.parents]
    missing = [p for p in there if p not in listed and not p.startswith(NOT_IN_NAV)]
    assert not missing, f"add a line to `nav` in mkdocs.yml for each of {missing}"
    assert not [p for p in listed if p not in there], "mkdocs.yml names a page that is not there"
    assert len(listed) == len(set(listed))


def test_the_pages_for_readers_are_few_and_short() -> None:
    pages = sorted(DOCS.glob("*.md"))
    assert len(pages) <= PAGES, "merge, or move what was measured into docs/studies and design into docs/internals"
    lines = {page.name: len(page.read_text(encoding="utf-8").splitlines()) for page in pages}
    assert not {name: n for name, n in lines.items() if n > LINES and name not in LONG}


def test_the_pages_for_readers_are_no_walls_of_text() -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in PRODUCT}
    assert sum(len(text.split()) for text in texts.values()) <= WORDS, "say it once, or in the error message alone"
    walls = {page.name: found for page, text in texts.items() if (found := list(_walls(text)))}
    assert not walls, "one idea per paragraph: split it, or make it a list or a table"
    assert len([*_walls("word " * 91), *_walls("| " + "word " * 71 + "| |\n")]) == 2, "a wall would be found"


def _walls(text: str) -> Iterator[str]:
    """Paragraphs, list items and table cells with too many words; code blocks are none of them."""
    text = re.sub(r"^( *)```.*?^\1```$|^ {4}.*?$", "", text, flags=re.M | re.S)
    table, rest = re.compile(r"^ *\|.*", re.M), re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|^#.*$", re.M)
    cells = [cell for row in table.findall(text) for cell in re.split(r"(?<!\\)\|", row)]
    parts = [(cell, CELL) for cell in cells] + [(part, PARAGRAPH) for part in rest.split(table.sub("\n", text))]
    yield from (part for part, most in parts if len(part.split()) > most)


@pytest.mark.parametrize("page", all_pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_anchors_resolve(page: Path) -> None:
    broken = [link for link in links_of(page) if not link.startswith(("http:", "https:")) and not _leads(page, link)]
    assert not broken


def _leads(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if ROOT not in target.parents or not target.exists():
        return False
    return not anchor or (target.suffix == ".md" and anchor in anchors_of(target))


def test_every_decision_is_in_their_list() -> None:
    folder = DOCS / "internals" / "decisions"
    listed = (folder / "README.md").read_text(encoding="utf-8")
    assert not [p.name for p in folder.glob("0*.md") if f"({p.name})" not in listed]


def test_no_page_fetches_from_outside_while_it_is_read() -> None:
    config = site_config()
    assert config["theme"]["font"] is False and config["strict"] is True
    own = [*config["extra"]["polyfills"], *config.get("extra_css", []), *config.get("extra_javascript", [])]
    assert not [url for url in own if "//" in url]
    for page in all_pages():
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(script|img|iframe|link)\b[^>]*https?:|^```mermaid", text, re.M), (
            page
        )


def test_the_builders_versions_are_pinned() -> None:
    lines = (DOCS / "_site" / "requirements.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert {"mkdocs-material", "mkdocs", "mkdocstrings"} <= {pin.partition("==")[0] for pin in pins}
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)


def test_the_api_page_has_every_public_name_once() -> None:
    listed = re.findall(r"^::: (\w+)\.(\S+)\.(\w+)$", (DOCS / "reference" / "api.md").read_text(encoding="utf-8"), re.M)
    names = [(room, name) for room in ROOMS for name in importlib.import_module(room).__all__]
    assert sorted((room, name) for room, _, name in listed) == sorted(names)
    lost = [(module, name) for room, module, name in listed if name not in names_of(room, module)]
    assert not lost, "the module does not define it any more, nor import it"


def test_the_numbers_of_choose_are_what_the_estimators_say() -> None:
    known = {"SmolLM2-135M": 134_515_008, "Qwen2.5-0.5B": 494_032_768, "Qwen2.5-7B": 7_615_616_512}
    assert {name: choose_tables.BY_NAME[name].parameters for name in known} == known, "as their files on the Hub say"
    page = choose_tables.PAGE.read_text(encoding="utf-8")
    assert page == choose_tables.page_with_numbers(page), "python -m tests.support.choose_tables writes them anew"


def test_the_price_of_the_readme_is_what_plan_prints() -> None:
    """Before: the README had the price of a full training, which needs more memory than its adapter."""
    limit = memory_limit_mib(134_515_008, trained=4_884_480)  # SmolLM2-135M, and an adapter of r = 16
    price = ModalExecutor(gpu="T4", max_memory_mib=limit).price_of(ReplicaSpec("modal://diloco/mine", "r00"))
    assert price is not None
    assert f"3 × T4: ${3 * price:.2f} per hour in all" in (ROOT / "README.md").read_text()


def test_the_drawing_of_the_bucket_has_the_keys_of_the_layout() -> None:
    assert bucket_drawing() == drawn_keys(str(layout.__doc__).partition("{run}/\n")[2].partition("\n\n")[0])


def test_a_run_has_only_keys_of_the_drawing(tmp_path: Path) -> None:
    """A loop of one's own; house/test_site_commands.py looks at a whole run with a reward (slow)."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = StoreManager(str(tmp_path / "run"), "r00", replicas=1, steps=2)
    with make_diloco(model, optimizer, manager, sync_every=2):
        while not manager.done:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    written = key_shapes(tmp_path / "run")
    assert written <= bucket_drawing() and {"run.json", "steps/{}/commit.json", "snapshots/{}/manifest.json"} <= written


@pytest.mark.parametrize("quoted", quoted_errors(DOCS / "faq.md"), ids=lambda text: text[:40])
def test_a_quoted_error_is_one_that_the_program_prints(quoted: str) -> None:
    assert any(is_within(quoted, text) for text in source_texts()), "no text in the source reads so; quote it anew"


def test_every_message_of_the_page_is_read() -> None:
    assert len(quoted_errors(DOCS / "faq.md")) >= 25


def test_a_quoted_error_that_was_reworded_would_be_found() -> None:
    assert not any(is_within("there is no run at … (no run.yaml). Check the path", text) for text in source_texts())


def test_each_pitfall_names_a_test_that_is_there() -> None:
    section = (DOCS / "faq.md").read_text(encoding="utf-8").partition("\n## Pitfalls\n")[2]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith("| pitfall")]
    named = [re.search(r"`(tests/\w+/\w+\.py)::(\w+)` \|$", row) for row in rows]
    assert len(rows) >= 20 and all(named), [row for row, name in zip(rows, named, strict=True) if name is None]
    missing = [n[0] for n in named if n and not re.search(rf"^def {n[2]}\(", (ROOT / n[1]).read_text(), re.M)]
    assert not missing


def test_what_agents_are_told_to_open_and_to_run_is_there() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= set(targets)
    paths = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|yml))`", text)
    assert len(paths) > 15 and not [path for path in paths if not (ROOT / path).exists()]


SETTINGS = set(list_settings(RunConfig))
FOREIGN = ("trainer.",)  # PRIME-RL's, in docs/backends.md: tests/inner/test_prime_rl.py looks at them


@pytest.mark.parametrize("page", all_pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_each_toml_block_is_toml_with_settings_that_exist(page: Path) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.DOTALL)
    unknown = [
        name
        for block in blocks
        for name in _settings_in(tomllib.loads(block))
        if name not in SETTINGS and not name.startswith(FOREIGN)
    ]
    assert not unknown


def _settings_in(table: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in table.items():
        name = f"{above}{key}"
        if isinstance(value, dict) and name not in SETTINGS:
            yield from _settings_in(value, f"{name}.")
        else:
            yield name


def test_each_command_that_is_shown_has_a_verb_and_options_that_exist() -> None:
    known = {verb: {*parser._option_string_actions} for verb, parser in verbs().items()}
    wrong, seen = list[str](), set[str]()
    for page in all_pages():
        if page.name in ("CHANGELOG.md", "log.md"):  # what was
            continue
        for verb, rest in _commands_in(page.read_text(encoding="utf-8")):
            options = re.findall(r"(?<![\w-])--[a-z][a-z-]+", rest)
            seen.add(verb)
            if verb not in known or not set(options) <= known[verb]:
                wrong.append(f"{page.name}: diloco {verb}{rest}")
    assert not wrong and len(seen) > 20


def test_every_verb_stands_in_the_reference_of_operations() -> None:
    shown = {verb for verb, _ in _commands_in((DOCS / "reference" / "operations.md").read_text(encoding="utf-8"))}
    assert set(verbs()) - shown == {"completion"}, "completion is a line of its own below the list"


def _commands_in(text: str) -> Iterator[tuple[str, str]]:
    """(verb, what follows it) of code spans and of lines that begin with the program's name."""
    for line in [*re.findall(r"`(diloco [^`\n]+)`", text), *(line.strip() for line in text.splitlines())]:
        if match := re.match(r"(?:\$ |\.venv/bin/)?diloco ([a-z]+)\b(.*)", line):
            yield match[1], match[2].split("#")[0].split(" -- ")[0]


def test_the_python_of_the_page_about_rewards_does_what_it_says() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "rewards.md").read_text(encoding="utf-8"), re.M | re.DOTALL)
    found: dict[str, Any] = {}
    for block in blocks:
        exec(block, found)
    replies = [[{"role": "assistant", "content": text}] for text in ("it is 7", "8")]
    assert found["score"](replies, answer=["7", "7"], other=[1, 2]) == [1.0, 0.0]
    world = found["World"]()
    world.reset(stock={"bolts": 3}, prompt="…")
    assert world.count("bolts") == 3 and world.get_reward() == 0.0

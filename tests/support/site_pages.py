"""The documentation as a reader of files sees it: pages, links, anchors, marked commands.   No builder of sites here.

    mkdocs.yml nav ──▶ pages      docs/*.md ──▶ links (target, anchor), headings ──▶ anchors as the builder spells them
    <!-- runnable -->  in front of a fence: its commands run in the tests, page by page, in one new folder
    <!-- runnable slow -->  the same, with the slow tests

Not promised: anchors that a generated page (source/…) has.
"""

import ast
import re
import textwrap
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md")
_FENCE = re.compile(r"^(`{3,}|~{3,})([^\n]*)\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!\!)\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_IMAGE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
_RUNNABLE = re.compile(r"<!-- runnable( slow)? -->\s*\n```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Commands:
    """One marked fence.   slow: too long for the fast tests."""

    page: Path
    text: str
    slow: bool


def all_pages() -> list[Path]:
    return [*sorted(p for p in DOCS.rglob("*.md") if "_site" not in p.parts), *(ROOT / name for name in OUTSIDE)]


def site_config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def nav_pages(entry: Any) -> Iterator[str]:
    """The pages of the nav, in its order."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for below in entry.values():
            yield from nav_pages(below)
    else:
        for below in entry:
            yield from nav_pages(below)


def prose(text: str) -> str:
    """A page without its fences and code spans, in which nothing is a link."""
    return re.sub(r"(`+)[^`].*?\1", "", _FENCE.sub("", text))


def links_of(page: Path) -> list[str]:
    text = prose(page.read_text(encoding="utf-8"))
    return [*_LINK.findall(text), *_IMAGE.findall(text)]


def anchors_of(page: Path) -> set[str]:
    """Anchors of its headings, as Python-Markdown spells them (and GitHub, where there are no two of one name)."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found = set[str]()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text, re.MULTILINE):
        name = slug(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        while name in found:
            stem, _, number = name.rpartition("_")
            name = f"{stem}_{int(number) + 1}" if number.isdigit() and stem else f"{name}_1"
        found.add(name)
    return found


def slug(heading: str) -> str:
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def runnable(page: Path) -> list[Commands]:
    text = page.read_text(encoding="utf-8")
    return [Commands(page, block, bool(slow)) for slow, block in _RUNNABLE.findall(text)]


# -------------------------------------------------------------------- the drawing of the bucket


def drawn_keys(tree: str) -> set[str]:
    """The keys of a drawing, each {field} as {}.   "mean/{a}.json, {b}.bin" is two; "again/" is a whole run."""
    folders, found = list[str](), set[str]()
    for line in textwrap.dedent(tree).splitlines():
        match = re.match(r"((?:│   |    )*)[├└]── (.*)", line)
        if match is None:
            continue
        depth, entry = len(match[1]) // 4, re.split(r"\s{2,}", match[2])[0].rstrip()
        folders = folders[:depth]
        if entry.endswith("/"):
            folders.append(entry)
            continue
        first, *others = entry.split(", ")
        head, slash, _ = first.rpartition("/")
        found |= {f"{''.join(folders)}{name}" for name in (first, *(f"{head}{slash}{name}" for name in others))}
    return {re.sub(r"\{[^}]*\}", "{}", key) for key in found}


def bucket_drawing() -> set[str]:
    """The keys that the page for readers draws."""
    return drawn_keys((DOCS / "concepts.md").read_text(encoding="utf-8").partition("RUN/\n")[2].partition("```")[0])


def key_shapes(run: Path) -> set[str]:
    """The keys of a run in a folder, without its report, what its processes print, and half-written files."""
    not_keys = ("processes/", ".tmp/", "report.")
    keys = [path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()]
    return {_shape(key) for key in keys if not key.startswith(not_keys)}


def _shape(key: str) -> str:
    """r01-1-0123…ef.bin is {}-{}-{}.bin; names of the user's and the model's files are one {}."""
    folder, _, rest = key.partition("/")
    if folder in ("code", "model") and rest != "manifest.json":
        return "code/{}/{}" if folder == "code" else "model/{}"
    if folder == "model":
        return "model/{}"
    parts = re.sub(r"[0-9a-f]{16,}", "{}", key).split("/")
    parts = [re.sub(r"\b(r\d{2,5}|supervisor)\b", "{}", part) for part in parts]
    parts = [re.sub(r"\b\d+\b", "{}", part) for part in parts]
    return "/".join(parts)


# -------------------------------------------------------------------- names and texts of the source


@cache
def names_of(room: str, module: str) -> set[str]:
    """The names that a module defines or imports, without importing it."""
    found = set[str]()
    path = ROOT / room / f"{module.replace('.', '/')}.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def quoted_errors(page: Path) -> list[str]:
    """The texts in the first column of the page's tables of messages; … in a text stands for a varying part."""
    tables = re.findall(r"^\| message \| .*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    found = [re.match(r"\| (`+) ?(.+?) ?\1 \|", row) for table in tables for row in table.splitlines()]
    return [match[2] for match in found if match is not None]


def is_within(quoted: str, text: str) -> bool:
    """Do the quotation's pieces stand in the text, in their order?   At least one of them has 12 characters."""
    pieces = [piece.strip() for piece in quoted.split("…") if piece.strip()]
    if max(len(piece) for piece in pieces) < 12:
        return False
    place = 0
    for piece in pieces:
        if (place := text.find(piece, place)) < 0:
            return False
        place += len(piece)
    return True


@cache
def source_texts() -> tuple[str, ...]:
    """Every text of two words in the four rooms; of an f-string its constant parts, … between them."""
    found = list[str]()
    for room in ("diloco", "executors", "inner", "rendezvous"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                found.append(_text_of(node))
    return tuple({" ".join(text.split()) for text in found if " " in text})


def _text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text_of(node.left) + _text_of(node.right)
    return ""

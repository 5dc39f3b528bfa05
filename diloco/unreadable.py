"""Error messages for a file that is not a config, a URL without run.json, and missing things that a config names.

    bad.toml, line 3: replicas = 2 3       the file, the line and its text; the TOML parser's message
    grpo.py is a Python script             the kind of file, and where its parts belong
    rewards.score                    ──▶   did you mean "rewards.py:score"?
    no run.json at the URL                 no run, or other records of a run, which is lost then
    other files in the folder of a run     another folder, or the same loss

Not promised: that a proposed name is the intended one.  The user's code is not run.
"""

import ast
import re
import shlex
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from inner.data.refusals import folder_words
from inner.settings.task import is_code, setting_of
from rendezvous import layout
from rendezvous.errors import RecordsLost
from rendezvous.store import Readable
from rendezvous.stores.open import folder_of, open_store

NAMED = 5  # runs that a message names
SCRIPT = re.compile(r"^\s*(import \w|from [\w.]+ import |def \w+\(|class \w|#!.*python)", re.MULTILINE)
WHERE = re.compile(r" \(at line (\d+), column \d+\)")
BARE = re.compile(r"\s*[\w.\"-]+\s*=\s*(?!true|false|inf|nan)([A-Za-z/~][^\"'#=]*?)\s*(#.*)?")
SPELLING = re.compile(r"(.*?)(?:\.py)?(?:[.:/]+(\w+))?(?::.*)?")


def toml_fault(path: Path, error: Exception) -> str:
    """Return the message for a config file that could not be parsed."""
    if isinstance(error, FileNotFoundError):
        return f"there is no file {path}.{file_hint(path)} `diloco init FOLDER` writes one"
    if path.is_dir():
        there = path / "run.toml"
        hint = f"did you mean {there}?" if there.is_file() else "give a TOML file; `diloco init` writes one"
        return f"{path} is a folder, and a run is described by a file: {hint}"
    if not path.is_file():
        return f"{path} cannot be read as TOML: {error}"
    if isinstance(error, UnicodeDecodeError):
        return f"{path} is not text in UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8"
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix in (".py", ".ipynb") or (path.suffix != ".toml" and SCRIPT.search(text)):  # TOML may contain code
        return _script_words(path, text)
    lines = text.splitlines()
    found = WHERE.search(str(error))
    number = int(found[1]) if found else len(lines)
    line = lines[number - 1].strip() if number <= len(lines) else ""
    bare = BARE.fullmatch(line)
    advice = f'. Text needs quotes: "{bare[1]}"' if bare else ""
    said = WHERE.sub("", str(error)).removesuffix(" (at end of document)")
    return f"{path} cannot be read as TOML, line {number}: {line:.120}\n  {said}{advice}"


def _script_words(path: Path, text: str) -> str:
    rewards = [name for name in _defined(text) if "reward" in name or "score" in name]
    function = f"{path.name}:{rewards[0] if rewards else 'FUNCTION'}"
    return (
        f"{path} is a Python script, and a run is described by a TOML file. `diloco init FOLDER` writes one that "
        f'works. In it, the reward stays Python: [inner.rewards] function = "{function}". Model, prompts and all '
        "fields of GRPOConfig are settings (docs/configuration.md lists them by TRL's names)"
    )


def file_hint(path: Path) -> str:
    """Return " Did you mean X?" with a file of the same folder; "" if none has a similar name."""
    beside = [p.name for p in path.parent.iterdir() if p.is_file()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, beside, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def absent_words(kind: str, name: str, path: Path, folder: Path) -> str:
    """Return the message for a setting that names no file.   name: the value.   folder: the config file's folder."""
    if not is_code(kind) and path.is_dir():
        return f"{setting_of(kind)}: {folder_words(path)}"
    if not is_code(kind):
        return f"{setting_of(kind)}: there is no file {path}.{file_hint(path)} Give a path relative to the config file"
    if path.suffix == ".py":  # the name after the colon was given
        return (
            f"{setting_of(kind)}: there is no file {path}.{file_hint(path)} Write file.py:name, with a path "
            "relative to the config file"
        )
    return (
        f"{setting_of(kind)} = {name!r} names no file and object.{object_hint(kind, name, folder)} Write "
        '"file.py:name", with a path relative to the config file'
    )


def object_hint(kind: str, spelling: str, folder: Path) -> str:
    """Return ' Did you mean "rewards.py:score"?' for a spelling that is not file and object; "" if none is near."""
    found = SPELLING.fullmatch(spelling)
    if found is None:
        return ""
    stem, name = found[1], found[2]
    files = [f"{stem}.py", f"{stem.replace('.', '/')}.py"]
    if (file := next((f for f in files if (folder / f).is_file()), "")) and stem:
        there = _defined_in(folder / file, kind)
        near = get_close_matches(name or "score", there, n=1, cutoff=0.6 if name else 0.0)
    else:
        wanted = name or stem
        file = next((p.name for p in sorted(folder.glob("*.py")) if wanted in _defined_in(p, kind)), "")
        near = [wanted] if file else []
    return f' Did you mean "{file}:{near[0]}"?' if near else ""


def _defined_in(path: Path, kind: str) -> list[str]:
    return _defined(path.read_text(encoding="utf-8", errors="replace"), kind)


def _defined(text: str, kind: str = "reward") -> list[str]:
    """Return the public functions of a file's text, for an environment also classes; [] if it is not Python."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, *([ast.ClassDef] if kind == "environment" else []))
    named = [n.name for n in body if isinstance(n, kinds)]
    return [name for name in named if not name.startswith("_")]


def foreign_words(url: str, found: str) -> str:
    """Return the message for a folder that holds other files than a run's.   found: names of these files.

    Raises RecordsLost if a run's records are there, too: then the folder needs a backup, and no new run."""
    words, is_lost = no_run_words(url, open_store(url, make=False))
    if is_lost:
        raise RecordsLost(words)
    own = shlex.quote(f"{url.rstrip('/')}/runs/first")
    return (
        f"{url} holds {found}, which belong to no run, and a run would mix its own files with them. Name a folder of "
        f"its own: --run {own}"
    )


def no_run_words(url: str, store: Readable) -> tuple[str, bool]:
    """Return the message for a URL without run.json, and whether it is lost: other records of a run are there."""
    beside = (layout.control_key(0), layout.commit_key(0), layout.claim_key("r00", 1))
    if stands := next((key for key in beside if store.get(key) is not None), ""):
        if store.get(layout.commit_key(0)) is None:
            return (
                f"{url}/{layout.RUN} is not there, though {stands} is. A script with DiLoCoCallback or make_diloco "
                "writes it when it joins: correct the script, and start it again. If it was there before, restore it "
                "from a backup, or from the bucket's versions"
            ), True
        return (
            f"{url}/{layout.RUN} is lost, though {stands} is there: without it the run cannot be read. Restore it from "
            "a backup, or from the bucket's versions"
        ), True
    if below := runs_below(url):
        return f"there is no run at {url} (no run.json), but below it: {', '.join(below)}. Name one of them", False
    return (
        f"there is no run at {url} (no run.json). Check the path, or start one: diloco train CONFIG "
        f"--run {shlex.quote(url)}"
    ), False


def runs_below(url: str) -> list[str]:
    """Return the newest runs in the folders of a folder, at most NAMED; [] for a bucket."""
    if (folder := folder_of(url)) is None:
        return []
    with suppress(OSError):
        found = sorted(folder.glob(f"*/{layout.RUN}"), key=lambda path: path.stat().st_mtime, reverse=True)
        return [shlex.quote(f"{url.rstrip('/')}/{path.parent.name}") for path in found[:NAMED]]
    return []

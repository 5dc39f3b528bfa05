"""Gathers a user's script for replicas: the script, modules beside it that it imports, files that it names, packages.

    train.py ─▶ compiles? ─▶ uses DiLoCoCallback or make_diloco? ─▶ siblings (imports)       ┐
                                                                    files named in a string  ├─▶ ScriptConfig
                                                                    (and in a .yaml of them) │
                                                                    --file                   ┘
    # /// script … dependencies = […] ///      requirements.txt beside it ─▶ packages of rented machines

Data is read from the current folder, as `python train.py` would.  If the script is outside the current folder, or a
link to such a script, its own folder has its modules, and the data that the current folder lacks.  Data that git
ignores are not sent unless --file names them; a file with the name of a secret (secret_names.py) is never sent.

Not promised: files whose names are not a string in the script or in such a configuration; name them with --file.
"""

import ast
import codecs
import importlib.util
import os
import re
import shlex
import subprocess
import tokenize
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diloco.run.config import FleetConfig
from diloco.run.script import Script, ScriptConfig
from diloco.run.sibling_modules import find_siblings
from diloco.units import byte_size
from executors.preflight.run_url import UsageError
from executors.preflight.secret_names import holds_secret, is_secret

MOST_BYTES = 20_000_000
JOINS = ("DiLoCoCallback", "make_diloco")
KEY_STAYS = "which holds a key: pass its value by --secret; --file {} sends the file"
SECRET_STAYS = "which has the name of a secret: pass its value by --secret, or rename the file"
EARLY = re.compile(r"(HF|HUGGINGFACE|TRANSFORMERS)_(?!.*TOKEN)\w+")  # read when the libraries are imported
FIRST = re.compile(r"^\s*(import|from) unsloth\b", re.M)  # changes transformers and TRL, if it is imported before them
SEEDED = (".seed(", "set_seed(", "seed_everything(")
UNSEEDED_NOTE = (
    "the code calls {0} without a seed, so the rows differ between replicas: their shares overlap, and a replica "
    "trains on rows that another one holds out. Give {0} a seed"
)
BLOCK = re.compile(r"^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$", re.M)  # PEP 723
NAMED = re.compile(  # `rewards.score`, also several with commas between; `rewards:score`; `sub/rewards.py`
    r"(?<![\w./:-])(?:(\w+(?:\.\w+)+|\w+(?=:\w))|((?:\./)*\w+(?:/\w+)*)\.py)(?![\w./-])"
)
COMMENT = re.compile(r"(^|\s)#.*")
OF_THIS_MACHINE = re.compile(r"^([\w.-]+(?:\[[^]]*\])?) *@ *file:.*")  # as `pip freeze` writes in conda
ADDRESS = re.compile(
    r"(?:\w+\+)?\w+://\S*/(?P<last>[\w.-]+?)(?:\.git)?/?(?:@[^#\s]*)?(?:#(?:.*egg=(?P<egg>[\w.-]+))?.*)?$"
)
CONFIGS, CONFIG_BYTES, WORD = (".yaml", ".yml", ".toml", ".json"), 100_000, re.compile(r"[^\s\"'`,;\[\]{}()<>=]+")
OPTIONS = {"--run", "--replicas", "--executor", "--place", "--gpu", "--max-usd", "--max-hours", "--detach", "--file"}
OURS = {"serverless-diloco", "torch", "transformers", "trl", "datasets", "peft", "accelerate", "numpy"}


@dataclass(frozen=True)
class Gathered:
    """A gathered script.   config: the run's config.   notes: sentences on files that are sent or not sent."""

    config: ScriptConfig
    notes: tuple[str, ...]


def read_script(
    name: str,
    arguments: Sequence[str],
    *,
    is_module: bool,
    more: Sequence[str],
    fleet: FleetConfig,
    checked: bool = True,
) -> Gathered:
    """Read a script and gather the files to send with it.   Raises UsageError.

    name: a path, or a module's name.   more: paths given with --file.   checked: refuse a script that joins no run.
    """
    base = here = Path.cwd()
    path = _module_file(name, base) if is_module else _script_file(name)
    if not path.is_relative_to(base) and not is_module:
        base = path.parent
    source = _source(path)
    is_here = not is_module or path in _module_paths(name, base)  # else the module is installed
    siblings = _imported_by(path, base, is_module=is_module) if is_here else []
    siblings += _modules_in(arguments, base, path)
    broken = list(_unreadable(siblings, path.parent))
    folders = [*dict.fromkeys((here, base))]
    placed = [_place(folders, one) for one in more]
    asked = {name: file for text, place in zip(more, placed, strict=True) for name, file in _asked_for(text, *place)}
    looked = [*(siblings or [path]), *(file for one, file in asked.items() if is_code(one))]
    if checked and not any(word in _text(one) for one in looked for word in JOINS):
        raise UsageError(
            f"{name} meets neither DiLoCoCallback nor make_diloco, so its replicas would average nothing. Give its "
            "trainer callbacks=[DiLoCoCallback()] (from diloco import DiLoCoCallback); docs/scripts.md shows more"
        )
    named = _with_configs(folders, dict(_named(folders, siblings, arguments)))
    files = {**named, **asked, **dict(_code(base, siblings))}
    ignored = _left_out(folders, files, {_name_below(base, path) for base, path in placed})
    unsent = {one: f"which git ignores; --file {shlex.quote(one)} sends it" for one in ignored}
    keys = {one for one in set(files) - set(asked) if not is_code(one) and holds_secret(files[one])}
    unsent |= {one: KEY_STAYS.format(shlex.quote(one)) for one in keys}
    unsent |= {one: SECRET_STAYS for one, file in files.items() if is_secret(one) or is_secret(file.resolve().name)}
    sent = {one: file for one, file in files.items() if one not in unsent}
    _refuse_large(sent)
    packages = packages_of(name, source, path.parent if is_here else None)
    shown = _name_below(base, path) if is_here and not is_module else name
    fresh = any(FIRST.search(_text(code)) or any(_set_early(code)) for code in siblings)
    script = Script(shown, tuple(arguments), is_module, packages, fresh=fresh)
    stem = name.rpartition(".")[2] if is_module else Path(name).stem
    return Gathered(
        ScriptConfig(name=stem, fleet=fleet, own_script=script, files=sent),
        (
            *_notes(sent, unsent, packages, arguments, {text for code in siblings for text in _strings(code)}),
            *broken,
            *(UNSEEDED_NOTE.format(one) for one in sorted(_unseeded(siblings))),
        ),
    )


def _script_file(name: str) -> Path:
    """Return the real path of the script: Python finds the script's modules beside it.   Raises UsageError."""
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"there is no script {name}. Give the path of a Python file, or a module with -m")
    if path.suffix == ".ipynb":
        raise UsageError(f"{name} is a notebook. `jupyter nbconvert --to script {shlex.quote(name)}` makes it a script")
    return path.resolve()


def _module_paths(name: str, base: Path) -> tuple[Path, Path]:
    return base / f"{name.replace('.', '/')}.py", base / name.replace(".", "/") / "__main__.py"


def _module_file(name: str, base: Path) -> Path:
    """Return the file of a module in the base folder, or of an installed module.   Raises UsageError."""
    for path in _module_paths(name, base):
        if path.is_file():
            return path
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin)
    raise UsageError(f"there is no module {name}, neither in this folder nor installed here. Check its name")


def _source(path: Path) -> str:
    """Return the file's text.   Raises UsageError if it is not valid Python."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
        compile(text, str(path), "exec")
    except (SyntaxError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        line = f", line {error.lineno}: {(error.text or '').strip()}" if isinstance(error, SyntaxError) else ""
        raise UsageError(f"{os.path.relpath(path)}{line}: {getattr(error, 'msg', error)}. Correct the line") from None
    return text


def _unreadable(codes: Sequence[Path], folder: Path) -> Iterator[str]:
    """Yield notes on modules of packages that are not valid Python: the script may never import them.

    folder: where the script is. An invalid module there is a mistake, so raise UsageError."""
    for code in codes:
        try:
            _source(code)
        except UsageError as error:
            if code.parent == folder:
                raise
            yield f"the script cannot import a module that it may not need: {error}"


def _text(code: Path) -> str:
    return code.read_bytes().decode(errors="replace")


def _parsed(code: Path) -> ast.Module:
    """Return the syntax tree; an empty one for a module that is not valid Python."""
    with suppress(UsageError):
        return ast.parse(_source(code))
    return ast.Module([], [])


# -------------------------------------------------------------------- what travels


def is_code(name: str) -> bool:
    return name.endswith(".py")


def _imported_by(path: Path, base: Path, *, is_module: bool) -> list[Path]:
    """Return the script and the modules that it imports: from its folder, and from the base folder and its src/.

    Many scripts put these two folders on Python's path, or expect them in PYTHONPATH."""
    beside = [path, *find_siblings(path, base if is_module else None).values()]
    found = set[Path]()
    for root in () if is_module else {base, base / "src"} - {path.parent}:
        for code in beside:
            if code not in found and root.is_dir():
                found.update(find_siblings(code, root).values())
    return [*beside, *sorted(found.difference(beside))]


def _modules_in(arguments: Sequence[str], base: Path, script: Path) -> list[Path]:
    """Return modules of the base folder that an argument names (NAMED), and their imports."""
    named = {found for text in arguments for found in NAMED.findall(text)}
    stems = [base / (dotted or below).replace(".", "/").lstrip("/") for dotted, below in sorted(named)]
    found = list[Path]()
    for stem in stems:  # `pkg.rewards.score`: pkg/rewards.py
        below = [above for above in (stem, *stem.parents) if above != base and above.is_relative_to(base)]
        upward = [above.with_suffix(".py") for above in below]
        found += [path for path in upward if path.is_file()][:1]
    return [one for code in found if code != script for one in (code, *find_siblings(code, base).values())]


def _code(base: Path, codes: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield (path in the run's folder, file) of the code.   Raises UsageError."""
    for code in codes:
        name = _name_below(base, code)
        if is_secret(name) or is_secret(code.resolve().name):
            raise UsageError(
                f"the code imports {name}, which has the name of a secret, and a run's files are not encrypted. Read "
                "its values from os.environ and name the variables with --secret, or give the module another name"
            )
        yield name, code


def _named(folders: Sequence[Path], codes: Sequence[Path], arguments: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield (path in the run's folder, file) of files that the code or an argument names.

    folders: the places to look in; the first folder that has a file counts."""
    typed = {part for text in arguments for part in (text, text.partition("=")[2])}
    yield from _files_here(folders, typed | {text for code in codes for text in _strings(code)})


def _with_configs(folders: Sequence[Path], named: Mapping[str, Path]) -> dict[str, Path]:
    """Return the named files and the files that a configuration among them names, from its own folder or from here."""
    found, new = dict(named), list(named)
    while new:
        name = new.pop()
        if name.endswith(CONFIGS) and found[name].stat().st_size < CONFIG_BYTES:
            words = set(WORD.findall(found[name].read_text(encoding="utf-8", errors="replace")))
            texts = words | {os.path.join(os.path.dirname(name), word) for word in words}
            more = {one: file for one, file in _files_here(folders, texts) if one not in found and not is_code(one)}
            found |= more
            new += more
    return found


def _files_here(folders: Sequence[Path], texts: Collection[str]) -> Iterator[tuple[str, Path]]:
    """Yield (path in the run's folder, file) of the texts that are names of files."""
    for text in sorted(texts):
        for base in reversed(folders):
            with suppress(OSError, ValueError):  # a string may be anything
                file = base / os.path.normpath(text)
                is_inside = file.is_file() and file.resolve().is_relative_to(base.resolve())
                if is_inside and not Path(text).is_absolute():
                    yield os.path.normpath(text), file


def _name_below(base: Path, code: Path) -> str:
    """Return the name by which the script finds a file of code, which may be a link to elsewhere."""
    return Path(os.path.abspath(code)).relative_to(base).as_posix()


def _strings(code: Path) -> Iterator[str]:
    if "load_dotenv" in _text(code):
        yield ".env"
    for node in ast.walk(_parsed(code)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < 200:
            yield node.value


def _set_early(code: Path) -> Iterator[str]:
    """Yield variables that the code sets, and that libraries read when they are imported."""
    for node in ast.walk(_parsed(code)):
        match node:
            case ast.Assign(targets=[ast.Subscript(ast.Attribute(attr="environ"), ast.Constant(str(name)))]) | ast.Call(
                ast.Attribute(ast.Attribute(attr="environ"), "setdefault"), [ast.Constant(str(name)), _]
            ) if EARLY.fullmatch(name) and name not in os.environ:
                yield name


def _unseeded(codes: Sequence[Path]) -> set[str]:
    """Return which of `shuffle` and `train_test_split` the code calls without a seed for this call or process."""
    if any(word in _text(code) for code in codes for word in SEEDED):
        return set()
    calls = (node for code in codes for node in ast.walk(_parsed(code)) if isinstance(node, ast.Call))
    found = set[str]()
    for call in calls:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        is_meant = name == "train_test_split" or (name == "shuffle" and not call.args)
        if is_meant and {"seed", "generator", "random_state", None}.isdisjoint(one.arg for one in call.keywords):
            found.add(f"{name}()")
    return found


def _place(folders: Sequence[Path], text: str) -> tuple[Path, Path]:
    """Return (folder of the run, file) of one --file.   text: as you typed it.   Raises UsageError."""
    for where in folders:
        typed = Path(os.path.abspath(where / text))
        real = Path(os.path.realpath(typed))  # links above a folder do not count in the names of its files
        for path in (typed, Path(os.path.realpath(typed.parent), typed.name), real):
            for base in folders:
                if path.exists() and path.is_relative_to(base) and real.is_relative_to(base.resolve()):
                    return base, path
    raise UsageError(f"--file {text}: there is no such file in {folders[0]}. Give a path inside this folder")


def _asked_for(text: str, base: Path, path: Path) -> Iterator[tuple[str, Path]]:
    """Yield (path in the run's folder, file) of one --file, which may be a folder.   Raises UsageError."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if not file.is_file() or {"__pycache__", ".git"} & set(file.relative_to(base).parts):
            continue
        name = file.relative_to(base).as_posix()
        if secret := [one for one in (name, file.resolve().name) if is_secret(one)]:
            raise UsageError(f"--file {text}: {secret[0]} has the name of a secret. Replicas get secrets by --secret")
        if name != name.encode(errors="replace").decode():
            raise UsageError(f"--file {text}: the name {name!r} is not UTF-8. Give the file another name")
        yield name, file


def _left_out(folders: Sequence[Path], files: Mapping[str, Path], more: Collection[str]) -> set[str]:
    """Return data files that git ignores and --file does not name. A named folder that git ignores is sent whole."""
    ignored = set[str]()
    for base in folders:
        names = [name for name, file in files.items() if file == base / name and not is_code(name)]
        ignored |= _ignored_by_git(base, [*names, *more])
    whole = tuple(f"{name}/" for name in more if name in ignored)
    return {name for name in ignored.intersection(files).difference(more) if not name.startswith(whole)}


def _ignored_by_git(base: Path, names: Sequence[str]) -> set[str]:
    """Return the names that git ignores; an empty set without git or outside a repository.

    git refuses all names if one is in a submodule or behind a link, so we ask once per repository, by real paths."""
    folders = {folder: folder.resolve() for folder in {(base / name).parent for name in names}}
    tops = {folder: _repository_of(folder) for folder in set(folders.values())}
    places = {name: folders[(base / name).parent] / (base / name).name for name in names}
    ignored = set[Path]()
    for top in {top for top in tops.values() if top is not None}:
        own = b"\0".join(os.fsencode(path.relative_to(top)) for path in places.values() if tops[path.parent] == top)
        with suppress(OSError):
            asked = subprocess.run(["git", "check-ignore", "-z", "--stdin"], cwd=top, input=own, capture_output=True)
            ignored |= {top / os.fsdecode(name) for name in asked.stdout.split(b"\0") if name}
    return {name for name, path in places.items() if path in ignored}


def _repository_of(folder: Path) -> Path | None:
    """Return the top of the git repository that has the folder, which may be a submodule; None outside of all."""
    return next((above for above in (folder, *folder.parents) if (above / ".git").exists()), None)


def _refuse_large(files: dict[str, Path]) -> None:
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if (total := sum(sizes.values())) > MOST_BYTES:
        large = sorted(sizes, key=lambda name: -sizes[name])[:3]
        told = ", ".join(f"{name} ({byte_size(sizes[name])})" for name in large)
        raise UsageError(
            f"the script has {byte_size(total)} of files, and a run takes {byte_size(MOST_BYTES)} at most: {told}. Put "
            "data on the Hub or into a bucket, and let the script read it there"
        )


def _notes(
    files: Mapping[str, Path],
    unsent: Mapping[str, str],
    packages: Sequence[str],
    arguments: Sequence[str],
    strings: Collection[str],
) -> Iterator[str]:
    yield f"sends {', '.join(sorted(files)) or 'no files: the module is installed where replicas run'}"
    for name, why in sorted(unsent.items()):
        yield f"does not send {name}, {why}"
    for name in sorted(one for one, file in files.items() if holds_secret(file)):
        yield f"sends {name} with a key in it, and a run's files are not encrypted: use os.environ and --secret"
    if packages:
        yield f"rented machines install {', '.join(packages)}"
    for one in sorted({*arguments, *strings}):
        if _is_folder_here(one) and not any(f.startswith(f"{Path(one)}/") for f in files):
            by = "an argument" if one in arguments else "the code"
            yield f"does not send the folder {one}, which {by} names; --file {shlex.quote(one)} sends it"
    for one in arguments:
        if one.partition("=")[0] in OPTIONS:
            yield f"{one} comes after the script, so the script gets it; options of `diloco launch` must be before it"


def _is_folder_here(text: str) -> bool:
    """Whether a folder below the current one has this name and something in it."""
    with suppress(OSError, ValueError):  # a string may be anything
        path = Path(text)
        return (
            path.name != ""
            and ".." not in path.parts
            and not path.is_absolute()
            and path.is_dir()
            and any(path.iterdir())
        )
    return False


# -------------------------------------------------------------------- its packages


def packages_of(name: str, source: str, folder: Path | None) -> tuple[str, ...]:
    """Return the requirements of a script, without requirements that this project has itself.   Raises UsageError.

    folder: where its requirements.txt may lie; None for an installed module."""
    from packaging.requirements import InvalidRequirement, Requirement

    told = [*_inline(name, source)]
    file = None if folder is None else folder / "requirements.txt"
    if file is not None and file.is_file():
        lines = (COMMENT.sub("", line).strip() for line in _decoded(file.read_bytes()).splitlines())
        own = ("-", ".", "/", "file:")  # pip's options, and files of this machine
        told += [line for line in lines if line and not line.startswith(own)]
    found: dict[str, str] = {}
    for text in told:
        try:
            text = OF_THIS_MACHINE.sub(r"\1", text)
            address = ADDRESS.match(text)  # git+https://github.com/OWNER/NAME.git@TAG#egg=NAME
            named = (address["egg"] or address["last"]) if address else Requirement(text).name
            found.setdefault(named.lower().replace("_", "-"), text)
        except InvalidRequirement as error:
            why = f"which is not a requirement such as numpy>=2: {error}"
            raise UsageError(f"{name} asks for the package {text!r}, {why}. Correct that line") from None
    return tuple(text for package, text in found.items() if package not in OURS)


def _decoded(body: bytes) -> str:
    """Return the text of a requirements.txt, which PowerShell writes as UTF-16."""
    is_wide = body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return body.decode("utf-16" if is_wide else "utf-8-sig", errors="replace")


def _inline(name: str, source: str) -> Sequence[str]:
    """Return the dependencies of a script's PEP 723 block; [] without one."""
    blocks = [match for match in BLOCK.finditer(source) if match["type"] == "script"]
    if len(blocks) > 1:
        raise UsageError(f"{name} has {len(blocks)} blocks `# /// script`, and PEP 723 allows one. Join them")
    if not blocks:
        return []
    lines = blocks[0]["content"].splitlines()
    try:
        found = tomllib.loads("\n".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the `# /// script` block of {name} is not TOML: {error}. Correct or remove it") from None
    listed = found.get("dependencies", [])
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise UsageError(f"the `# /// script` block of {name}: dependencies must be a list of texts, got {listed!r}")
    return listed

"""Handles a start model that stays on the Hub: the run records its commit and each file's SHA-256; replicas check both.

    pin_hub_model(config) ──▶ HubModel(name, commit, files)   once, when the run is created; None: not from the Hub
    link_hub_files(model, folder) ──▶ folder of links         every replica: to its own HF cache, filled from the Hub
                                      └ a file with a wrong digest is downloaded again; if still wrong: HubError

    files    config.json, weights (*.safetensors, else *.bin), tokenizer, templates. We read no other files of the
             repository, so other files in a cache change nothing.

Not promised: that a commit stays on the Hub; that weights which no file has are equal everywhere (the caller compares
θ itself).  No torch here.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inner.models.known import ASK_S, cache_folder, cached_snapshot, read_json, refuse_config, refuse_hub_adapter
from inner.models.naming import HubError, HubModel, is_hub_name
from inner.network import network_words
from inner.printable import first_line
from inner.settings.inner import InnerConfig, InnerError

COMMIT = re.compile("[0-9a-f]{40}")
_AT_ONCE = 4  # files downloaded at once, with one connection each
_PIECE = 1 << 22  # bytes read and hashed at a time
_TEXTS = re.compile(r"[^/]+\.(json|txt|model|jinja|tiktoken)|additional_chat_templates/[^/]+\.jinja")
_SHARDS = {
    ".safetensors": re.compile(r"model(-\d+-of-\d+)?\.safetensors"),
    ".bin": re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin"),
}


def pin_hub_model(config: InnerConfig) -> HubModel | None:
    """Resolve the model's revision, fill this machine's cache, and compute the files' digests.

    None: the model cannot be pinned (a folder, files that only the repository's own code reads).
    Raises InnerError if the Hub does not have the model or does not answer.
    """
    if not is_hub_name(config.model):
        return None
    try:
        commit, names = _list_revision(config.model, config.revision)
        refuse_hub_adapter(config.model, names)
        files = needed_files(names)
        if not COMMIT.fullmatch(commit) or not files:
            return None
        where = _download_files(config.model, commit, files)
    except HubError as error:
        at = f" at revision {config.revision}" if config.revision else ""
        advice = "Check inner.model and inner.revision; for a private model, the Hub token, too"
        if not error.final:
            advice = "Check this machine's connection to the Hub (network, HF_ENDPOINT), then repeat the command"
        raise InnerError(f"the model {config.model}{at} could not be loaded: {error}. {advice}.") from error
    read = read_json(where["config.json"], f"model = {config.model!r}")
    refuse_config(read, config)
    return HubModel(config.model, commit, {name: _file_sha256(path) for name, path in where.items()})


def needed_files(names: Iterable[str]) -> list[str]:
    """Return those of these files that `from_pretrained` reads; [] if config.json or the weights are not among them."""
    names = sorted(names)
    if "config.json" not in names:
        return []
    for ending, shards in _SHARDS.items():
        if weights := [name for name in names if shards.fullmatch(name)]:
            others = tuple(f"{end}.index.json" for end in _SHARDS if end != ending)
            return [n for n in names if n in weights or (_TEXTS.fullmatch(n) and not n.endswith(others))]
    return []


def link_hub_files(model: HubModel, folder: Path) -> Path:
    """Check the files' digests, and make a from_pretrained folder of links; return it.   Raises HubError."""
    for name, path in _download_files(model.name, model.commit, model.files).items():
        if _file_sha256(path) != model.files[name]:
            path = cached_file(model.name, model.commit, name, again=True)
            _refuse_other_bits(model, name, _file_sha256(path))
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)  # left by an earlier try
        link.symlink_to(path.resolve())
    return folder


def fetch_snapshot(name: str, commit: str) -> Path:
    """Return this machine's cache folder with the files that `from_pretrained` reads.   Raises HubError."""
    _, names = _list_revision(name, commit)
    return _download_files(name, commit, needed_files(names))["config.json"].parent


def _refuse_other_bits(model: HubModel, name: str, found: str) -> None:
    if found != model.files[name]:
        raise HubError(
            f"{name} of {model.name} at commit {model.commit} has other bits here than when the run was created: "
            f"SHA-256 {found[:16]}…, the run has {model.files[name][:16]}…. The Hub, or a mirror of it (HF_ENDPOINT = "
            f"{hub_endpoint() or 'not set'}), gave two different files under one commit",
            final=True,
        )


def _list_revision(name: str, revision: str | None) -> tuple[str, list[str]]:
    """Return commit and file names of a revision, from the Hub; if the Hub does not answer, from the cache."""
    from huggingface_hub import HfApi

    try:
        info = HfApi(endpoint=hub_endpoint()).model_info(name, revision=revision, timeout=2 * ASK_S)
        names = [s.rfilename for s in info.siblings or ()]
        if "config.json" in names:
            cached_file(name, revision or "main", "config.json")  # this stores the revision's commit in the cache
        return info.sha or "", names
    except Exception as error:  # offline: the client raises various exceptions
        refused = error if isinstance(error, HubError) else _hub_error(name, revision, error)
        folder = cached_snapshot(name, revision)
        if refused.final or folder is None:
            raise refused from error
        return folder.name, [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]


def _download_files(name: str, commit: str, files: Iterable[str]) -> dict[str, Path]:
    """Return file name -> path in the cache. Only missing files are downloaded.   Raises OSError on a full disk."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return dict(threads.map(lambda file: (file, cached_file(name, commit, file)), files))


def cached_file(name: str, commit: str, file: str, again: bool = False) -> Path:
    """Return a file's path in this machine's cache; download it if it is missing.   Raises HubError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        path = hf_hub_download(
            name, file, revision=commit, force_download=again, endpoint=hub_endpoint(), cache_dir=cache_folder()
        )
        return Path(path)
    except (HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise _hub_error(name, commit, error) from error


def _hub_error(name: str, revision: str | None, error: Exception) -> HubError:
    """Make a HubError, which is final if the Hub answered that access is refused, or that the model does not exist."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    what = f"{name} at {revision}" if revision else name
    reason = first_line(error)[:160] if status else network_words(error)
    words = f"{what} cannot be taken from the Hub ({reason})"
    return HubError(words, final=status in (401, 403, 404))


def _file_sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


def hub_endpoint() -> str | None:
    """Return the Hub's address if it is not the usual one. The SDK reads the variable only once, at its import."""
    return os.environ.get("HF_ENDPOINT") or None

"""The first records of a run, and a run opened by its URL.

    run.json              RunRecord: the settings at launch, the mathematics, digests of the user's files, the codec
    model/manifest.json   ModelRecord: keys of the start model's files, and the layout of its parameters
    read_run(url) ─▶ Run(url, store, record)     without torch

A run without a trained step can be superseded by another run under the same URL (decision 024):

    RUN/steps/0000000000/commit.json   Superseded, by put_once: step 0 was not committed, and never will be
    RUN/again/                         the run that counts now, an ordinary run; it may be superseded too

    current_url(RUN) = RUN, or current_url(RUN/again) if a Superseded is there

One object decides.  A replica that would commit step 0 of the old run, however late, reads the Superseded
instead.  In a sealed run, a Superseded without the tag is ignored.  Nothing is deleted.

Not promised: that an opened run can be resumed (founding.py compares it with your config); a run at current_url(RUN),
as the superseding process may have died before it created the run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from diloco.run.config import ConfigError, FleetConfig, RunConfig, cut_fragments, without_settings
from inner.settings.task import EVAL, FILE_SETTINGS, MODULES
from rendezvous import layout
from rendezvous.agreement.rules import Timing
from rendezvous.errors import Forged, RecordsLost, WrongRun
from rendezvous.records.digests import SHA256, hex_of, is_digest
from rendezvous.records.records import Count, Key, Record, Step, UnixTime, WireError, Word
from rendezvous.records.schema import Where
from rendezvous.store import SEALED, Readable, Store
from rendezvous.stores.ahead import Ahead
from rendezvous.stores.open import open_store
from rendezvous.stores.run_key import as_sealed, run_key, signed_store

if TYPE_CHECKING:
    from inner.models.naming import HubModel

FAR = {"beat": 5.0, "poll": 1.0, "dead_after": 20.0}  # each request to a cloud costs time and money


def _is_parameter(raw: list[Any]) -> bool:
    """Whether `raw` is [name, shape, dtype] with a plausible shape."""
    if len(raw) != 3 or not isinstance(raw[0], str) or not isinstance(raw[1], list) or not isinstance(raw[2], str):
        return False
    return all(type(n) is int and 0 <= n < 1 << 40 for n in raw[1])


StoredFile = Annotated[dict[str, str], Where({"key", "digest"}.issubset, "key and digest of a file")]


HubCommit = Annotated[
    dict[str, str], Where(lambda raw: not raw or {"model", "commit"} <= set(raw), "model and commit on the Hub")
]


@dataclass(frozen=True)
class Parent:
    """The run and outer step that a run continues (diloco/model/fork.py); url = "": it began with its start model.

    run: the parent's nonce.   base: digest of its state at `step`.   outer_steps, inner_steps: taken before this run.
    """

    url: Key = ""
    run: Word = ""
    step: Step = 0
    base: Word = ""
    outer_steps: Count = 0
    inner_steps: Count = 0

    def __str__(self) -> str:
        return f"{self.url}@{self.step}" if self.url else "its start model"


@dataclass(frozen=True)
class RunRecord(Record):
    """The record run.json.   files: setting -> {"key", "digest"} of the user's files.   why_codec: "" unless "auto".

    parent: the step of another run that this run continues.
    """

    kind: ClassVar[str] = "run"
    config: dict[str, Any]
    mathematics: dict[str, Any]
    files: dict[str, StoredFile]
    nonce: Word
    at: UnixTime
    why_codec: str = ""
    parent: Parent = Parent()

    def written_fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "parent" or self.parent.url}

    def check_consistency(self) -> None:
        outer = self.mathematics.get("outer")
        if not isinstance(outer, dict) or not isinstance(self.config.get("outer"), dict):
            raise ValueError("it has no settings of the outer step")
        if not isinstance(outer.get("codec", ""), str):
            raise ValueError("its codec has no name")
        for setting, stored in self.files.items():
            _check_digest(setting, stored)
            name = stored["key"].rpartition("/")[2]
            if not layout.is_plain(name) or stored["key"] != layout.code_key(hex_of(stored["digest"]), name):
                raise ValueError(f"it has the {setting} file under {stored['key']!r}")

    def with_codec(self, codec: str, why: str = "") -> "RunRecord":
        """Return the same record with this codec in place of "auto"."""
        config = {**self.config, "outer": {**self.config["outer"], "codec": codec}}
        mathematics = {**self.mathematics, "outer": {**self.mathematics["outer"], "codec": codec}}
        return replace(self, config=config, mathematics=mathematics, why_codec=why)

    @property
    def codec(self) -> str:
        return self.mathematics.get("outer", {}).get("codec", "")


@dataclass(frozen=True)
class ModelRecord(Record):
    """The record model/manifest.json.   files: name -> {"key", "digest"}.   layout: [name, shape, dtype] in flat order.

    hub: {"model", "commit"} of a start model on the Hub, whose files' keys are ""; {} if its files are in the bucket.
    An adapter's files (adapter/…) are always in the bucket.
    theta: digest of θ₀ as flat fp32 (diloco/model/start_model.py); "" in a run of an older release.
    base: digest of the frozen weights under an adapter (outer/flat.py); "" if the whole model is trained.
    """

    kind: ClassVar[str] = "model"
    files: dict[str, StoredFile]
    layout: list[Annotated[list[Any], Where(_is_parameter, "[name, shape, dtype]")]]
    nonce: Word
    at: UnixTime
    hub: HubCommit = field(default_factory=dict[str, str])
    theta: Word = ""
    base: Word = ""

    def check_consistency(self) -> None:
        for name, stored in self.files.items():
            _check_digest(name, stored)
            on_hub = self.hub and not name.startswith("adapter/")
            there = stored["key"] == "" if on_hub else layout.is_model_file(stored["key"])
            if not (layout.is_plain(name) and there):
                raise ValueError(f"it has a file with name {name!r} and key {stored['key']!r}, which is not allowed")

    def fragment_sizes(self, fragments: int) -> list[int]:
        """Return the number of elements of each of `fragments` fragments of θ."""
        sizes = [prod(shape) for _, shape, _ in self.layout]
        return [sum(sizes[cut]) for cut in cut_fragments(sizes, fragments)]

    @property
    def hub_model(self) -> "HubModel | None":
        """The Hub model of θ₀; None if its files are in the bucket."""
        from inner.models.naming import HubModel

        digits = {name: hex_of(stored["digest"]) for name, stored in self.files.items() if not stored["key"]}
        return HubModel(self.hub["model"], self.hub["commit"], digits) if self.hub else None


def _check_digest(name: str, stored: Mapping[str, str]) -> None:
    if not is_digest(stored["digest"], SHA256):
        raise ValueError(f"it says of {name!r} that its digest is {stored['digest']!r}; that is not a {SHA256}")


class StoredConfig(RunConfig):
    """A config that names keys in the bucket in place of user files."""

    def user_files(self) -> dict[str, Path]:
        return {}

    def check_files(self) -> None:
        """Do nothing: readers compare the files with run.json when they fetch them."""


@dataclass(frozen=True)
class Run:
    """An open run.   resumed: whether the run existed before."""

    url: str
    store: Store
    record: RunRecord
    resumed: bool = True

    @property
    def config(self) -> RunConfig:
        """The config at launch; `fetch_files` reads the user's files.   Raises ConfigError."""
        try:
            return self._stored_config()
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.url}/{layout.RUN} has a config that no release of diloco writes ({error!r:.200}). If it was "
                "damaged, restore it from a backup"
            ) from error

    def _stored_config(self) -> RunConfig:
        raw = {k: v for k, v in self.record.config.items() if k != "overrides"}  # the tables already contain them
        if "script" in raw:
            from diloco.run.script import stored_config

            return stored_config(raw)
        if "inner" not in raw:
            raise ConfigError(
                f"{self.url} was started by a program of yours (DiLoCoCallback, make_diloco), which has its model and "
                "data. `diloco status` and `diloco report` read the run; start it, and save the model, from there"
            )
        entry = self.record.mathematics["entry_points"]
        files = {**self.record.files}
        held_out = files.pop(EVAL, None)
        files.pop(MODULES, None)
        is_named = held_out is not None and not raw["eval"].get("task")  # keep a task's name: it determines the scorer
        evaluation = {"eval": {**raw["eval"], "prompts": held_out["key"]}} if held_out and is_named else {}
        stands = {
            kind: stored["key"] + (f":{entry[kind]}" if entry.get(kind) else "") for kind, stored in files.items()
        }
        if raw["inner"].get("data", {}).get("task"):
            del stands["prompts"]
        weights = self.record.mathematics.get("reward_weights", {})
        stands |= self.record.mathematics.get("reward_models", {})
        functions = {stands.pop(kind): weight for kind, weight in weights.items()}
        inner = without_settings(raw["inner"], (FILE_SETTINGS[kind] for kind in stands))
        for kind, spelling in stands.items():
            table, _, key = FILE_SETTINGS[kind].partition(".")
            inner[table][key] = spelling
        inner |= {"rewards": {**inner["rewards"], "functions": functions}} if functions else {}
        try:
            return StoredConfig.from_dict({**raw, "inner": inner, **evaluation})
        except ConfigError as error:  # the release that founded the run took these settings
            raise ConfigError(
                f"run.json: {error}. Another release of serverless-diloco started this run: use that release"
            ) from error

    @property
    def timing(self) -> Timing:
        return timing_for(self.store, self.config.fleet)


def timing_for(store: Store, fleet: FleetConfig) -> Timing:
    """Return the intervals of polls and heartbeats: short if this machine serves the store, else 1 s and 5 s."""
    return fleet.timing if getattr(store, "near", False) else replace(fleet.timing, **FAR)


def read_run(url: str) -> Run:
    """Open the run at `url`.   Raises ConfigError for a URL without a run."""
    answers, store = _open_stores(url)
    return Run(url, store, with_script(decode_run(url, answers.get(layout.RUN) or b""), answers))


def with_script(record: RunRecord, answers: Readable) -> RunRecord:
    """Return run.json with the outer settings of a launched script, once a replica has written them."""
    if "script" not in record.config or (body := answers.get(layout.SCRIPT)) is None:
        return record
    agreed = RunRecord.decode(body)
    config = {**record.config, "outer": agreed.config["outer"]}
    mathematics = {**record.mathematics, **agreed.mathematics}
    return replace(record, config=config, mathematics=mathematics, why_codec=agreed.why_codec)


def decode_run(url: str, body: bytes) -> RunRecord:
    """Read run.json.   Raises WireError with the run's URL and the next thing to do."""
    if SEALED.search(body):  # a store with the run key would have removed the seal
        from rendezvous.stores.signed import LOST_SEAL

        raise WrongRun(LOST_SEAL.format(url=url))
    try:
        return RunRecord.decode(body)
    except WireError as error:
        raise WireError(
            f"{url}/{layout.RUN} cannot be read, so the run cannot be read: {error}. If it is damaged, "
            "restore it from a backup; nothing was written"
        ) from error


def store_of(url: str) -> Store:
    """Open the store of the run at `url`, but decode no run.json.   Raises ConfigError for a URL without a run."""
    return _open_stores(url)[1]


OPENING = (layout.RUN, layout.SEAL)  # the records that every reader needs first


def read_model(run: Run) -> ModelRecord | None:
    """Return the record of the run's model; None before it is published.   Raise RecordsLost if it is lost.

    Commits are written after the model, and so is snapshot 0, except in a fork and in a script's run. A script with
    make_diloco publishes no model: then no key begins with model/."""
    is_script = run.config.script is not None  # ConfigError: a program with make_diloco publishes no model
    later = [layout.commit_key(0), *([] if is_script or run.record.parent.url else [layout.snapshot_key(0)])]
    if (body := run.store.get(layout.MODEL_MANIFEST)) is None and any(run.store.get(key) is not None for key in later):
        body = run.store.get(layout.MODEL_MANIFEST)  # the model may have been published since the first look
        if body is None and (not is_script or run.store.list("model/")):
            raise RecordsLost(
                f"{run.url}/{layout.MODEL_MANIFEST} is lost, though the run has begun. It names the start model, and "
                "the order and shapes of its parameters. Restore it from a backup before you resume the run"
            )
    return None if body is None else ModelRecord.decode(body)


def _open_stores(url: str) -> tuple[Readable, Store]:
    """Return a store that has read run.json, and the run's store."""
    bare = open_store(url, make=False)
    answers = Ahead(bare)
    answers.ask(OPENING)
    return open_under_seal(url, bare, answers)


def open_under_seal(url: str, bare: Store, answers: Ahead) -> tuple[Readable, Store]:
    """Return these stores, with `answers` to the OPENING requests.   Raise if the store has no run.json."""
    if not answers.is_there(layout.RUN):
        from diloco.unreadable import no_run_words

        words, lost = no_run_words(url, bare)
        raise RecordsLost(words) if lost else ConfigError(words)
    store = signed_store(bare, run_key(), answers.get(layout.SEAL))
    return sealed.reading_through(answers) if (sealed := as_sealed(store)) is not None else answers, store


# -------------------------------------------------------------------- superseded runs


@dataclass(frozen=True)
class Superseded(Record):
    """A record in place of commit 0, which says that `again` contains the run that counts."""

    kind: ClassVar[str] = "superseded"
    nonce: Word
    at: UnixTime


def is_superseded(store: Readable) -> bool:
    """Whether the store has a Superseded of any writer."""
    body = store.get(layout.commit_key(0))
    if body is None or b'"superseded"' not in body[: Superseded.most]:
        return False
    try:
        return json.loads(body).get("kind") == Superseded.kind
    except (ValueError, AttributeError):
        return False


def leads_on(store: Store, answers: Readable) -> bool:
    """Whether the store has a Superseded of this run.   answers: the same store, or its earlier answers.

    A sealed run's Superseded must have the tag. Otherwise any writer to the bucket could keep the paying user
    from ending the fleet.  Raises WrongRun without the key of a sealed run."""
    if not is_superseded(answers):
        return False
    sealed = signed_store(store, run_key(), answers.get(layout.SEAL))
    try:
        return sealed is store or is_superseded(sealed)
    except Forged:
        return False


def current_url(url: str) -> str:
    """Return the current URL of the run that the user calls `url`."""
    while leads_on(store := open_store(url, make=False), store):
        url = url_below(url)
    return url


def url_below(url: str) -> str:
    """Convert "s3://b/x?region=r" -> "s3://b/x/again?region=r"."""
    path, mark, query = url.partition("?") if "://" in url else (url, "", "")
    return f"{path.rstrip('/')}/{layout.AGAIN}{mark}{query}"

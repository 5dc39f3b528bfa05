"""Found a run in a bucket, or find the one that is there.

    open_run   run.json (mathematics, digests of the user's files) · code/… · control/000000      light: no torch
    publish    model/{nonce}/… and then model/manifest.json: θ₀'s folder and the parameter layout   heavy, in a child
               of a model on the Hub the manifest alone: its commit and digests (diloco/start_model.py)
               with [inner.lora] the adapter, model/{nonce}/adapter/…, and its layout
    fetch_…    the same, in the other direction, for a replica

The first writer of run.json decides.  The same command again resumes; other mathematics under one URL is WrongRun.
"""

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from diloco.config import AUTO, ConfigError, FleetConfig, RunConfig, without_settings
from diloco.disk_space import full_disk_words, is_full
from diloco.runlog.ahead import Ahead
from diloco.superseded import is_superseded
from inner.settings.flat_names import EVAL, FILE_SETTINGS, MODULES
from inner.settings.inner import BUILT_IN_MODELS
from rendezvous import layout
from rendezvous.agreement.chain import first_open_step, lost_record
from rendezvous.agreement.membership import Wanted, read_control, write_control
from rendezvous.agreement.rules import Timing
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import BadKey, Corrupt, GaveUp, RecordsLost, StoreError, StoreRefused, WrongRun
from rendezvous.records.digests import SHA256, digest, has_digest, hex_of, is_digest, required_digest_kind
from rendezvous.records.records import Count, Key, Record, Step, UnixTime, WireError, Word, new_nonce
from rendezvous.records.schema import Where
from rendezvous.store import PatientStore, Readable, Store, plain_key, put_once
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.open import open_store, urls_above
from rendezvous.stores.signed import SignedStore, run_key, signed_store, under_key

if TYPE_CHECKING:
    from inner import InnerConfig
    from inner.models.hub_model import HubModel

LAUNCH_PATIENCE_S = 5.0  # a person is watching: say soon what is wrong
PUBLISH_PATIENCE_S = 20.0
FAR = {"beat": 5.0, "poll": 1.0, "dead_after": 20.0}  # every look at a cloud costs a round trip and a price


def _is_parameter(raw: list[Any]) -> bool:
    """Whether it is [name, shape, dtype], with a shape that is not absurd."""
    if len(raw) != 3 or not isinstance(raw[0], str) or not isinstance(raw[1], list) or not isinstance(raw[2], str):
        return False
    return all(type(n) is int and 0 <= n < 1 << 40 for n in raw[1])


StoredFile = Annotated[dict[str, str], Where({"key", "digest"}.issubset, "key and digest of a file")]
HubCommit = Annotated[
    dict[str, str], Where(lambda raw: not raw or {"model", "commit"} <= set(raw), "model and commit on the Hub")
]


@dataclass(frozen=True)
class Parent:
    """The run and outer step from which a run goes on (diloco/fork.py); url = "": it began with its start model.

    run: the other one's nonce.   base: digest of its state there.   outer_steps, inner_steps: taken before this run's.
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
    """run.json.   files: setting -> {"key", "digest"} of the user's files as launched.   why_codec: if we chose it.

    parent: where it goes on from.
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
            raise ValueError("it says nothing of outer steps")
        if not isinstance(outer.get("codec", ""), str):
            raise ValueError("its codec has no name")
        for setting, stored in self.files.items():
            _check_digest(setting, stored)
            name = stored["key"].rpartition("/")[2]
            if not layout.is_plain(name) or stored["key"] != layout.code_key(hex_of(stored["digest"]), name):
                raise ValueError(f"it has the {setting} file under {stored['key']!r}")

    def with_codec(self, codec: str, why: str = "") -> "RunRecord":
        """Return the same run, with a codec in the place of auto."""
        config = {**self.config, "outer": {**self.config["outer"], "codec": codec}}
        mathematics = {**self.mathematics, "outer": {**self.mathematics["outer"], "codec": codec}}
        return replace(self, config=config, mathematics=mathematics, why_codec=why)

    @property
    def codec(self) -> str:
        return self.mathematics.get("outer", {}).get("codec", "")


@dataclass(frozen=True)
class ModelRecord(Record):
    """model/manifest.json.   files: name -> {"key", "digest"}.   layout: [name, shape, dtype] in flat order.

    hub: {"model", "commit"} of a start model that is taken from the Hub; then a file's key is "".   {}: it is here.
    An adapter's files (adapter/…) are always here.
    theta: digest of θ₀ as flat fp32 (diloco/start_model.py); "" in a run of an older release.
    base: digest of the weights that an adapter leaves as they are (diloco/model_checks.py); "" if the whole model is
    trained.
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
                raise ValueError(f"it calls a file {name!r} and has it under {stored['key']!r}")

    @property
    def hub_model(self) -> "HubModel | None":
        """The model on the Hub that θ₀ is; None: its files are in the bucket."""
        from inner.models.hub_model import HubModel

        digits = {name: hex_of(stored["digest"]) for name, stored in self.files.items() if not stored["key"]}
        return HubModel(self.hub["model"], self.hub["commit"], digits) if self.hub else None


def _check_digest(name: str, stored: Mapping[str, str]) -> None:
    if not is_digest(stored["digest"], SHA256):
        raise ValueError(f"it says of {name!r} that its digest is {stored['digest']!r}; that is no {SHA256}")


class StoredConfig(RunConfig):
    """A config whose user files lie in the bucket, under the keys that it names."""

    def user_files(self) -> dict[str, Path]:
        return {}

    def check_files(self) -> None:
        """Readers compare them with run.json when they fetch them."""


@dataclass(frozen=True)
class Run:
    """An open run."""

    url: str
    store: Store
    record: RunRecord
    resumed: bool = True

    @property
    def config(self) -> RunConfig:
        """The config as launched; the user's files are read with `fetch_files`.   Raises ConfigError."""
        try:
            return self._stored_config()
        except (AttributeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.url}/{layout.RUN} has a config that no release of diloco writes ({error!r:.200}). If it was "
                "damaged, restore it from a backup"
            ) from error

    def _stored_config(self) -> RunConfig:
        raw = {k: v for k, v in self.record.config.items() if k != "overrides"}  # the settings have them
        if "inner" not in raw:
            raise ConfigError(
                f"{self.url} was started by a program with make_diloco, not by `diloco train`: its model and data "
                "are in that program. `diloco status` and `diloco report` read it; start and export from there"
            )
        entry = self.record.mathematics["entry_points"]
        files = {**self.record.files}
        held_out = files.pop(EVAL, None)
        files.pop(MODULES, None)
        is_named = held_out is not None and not raw["eval"].get("task")  # a task keeps its name: it names the scorer
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
        return StoredConfig.from_dict({**raw, "inner": inner, **evaluation})

    @property
    def timing(self) -> Timing:
        return timing_for(self.store, self.config.fleet)


def timing_for(store: Store, fleet: FleetConfig) -> Timing:
    """Return the intervals of looks and beats: short if this machine serves the store, else 1 s and 5 s."""
    return fleet.timing if getattr(store, "near", False) else replace(fleet.timing, **FAR)


def open_run(
    config: RunConfig,
    url: str,
    clock: Clock,
    *,
    replicas: int | None = None,
    steps: int | None = None,
    min_replicas: int | None = None,
    parent: Parent | None = None,
) -> Run:
    """Found the run at `url`, or resume it if it is the same.  Raises WrongRun, StoreRefused, ConfigError.

    parent: None for the one that it has, if it has one.
    """
    fleet = replace(  # a quorum that the config names is never lowered by a smaller --replicas
        config.fleet,
        replicas=replicas or config.fleet.replicas,
        steps=steps or config.fleet.steps,
        min_replicas=min_replicas or config.fleet.min_replicas,
    )
    config = replace(config, fleet=fleet)  # prompts are dealt out to as many replicas as the run is founded with
    raw = open_store(url)
    store = PatientStore(raw, clock, LAUNCH_PATIENCE_S)
    if not isinstance(raw, FileStore | MemoryStore) and store.get(layout.RUN) is None:
        _refuse_unfit(raw, clock)
    raw = under_key(raw, clock, run_key(), ask=store)
    store = PatientStore(raw, clock, LAUNCH_PATIENCE_S)
    from diloco import sizing  # it needs numpy, which a look at a run does not

    files = {setting: path.read_bytes() for setting, path in config.user_files().items()}
    mine = RunRecord(
        config.to_dict(), config.mathematics(), _file_records(config, files), new_nonce(), clock.wall(),
        parent=parent or Parent(),
    )  # fmt: skip
    for setting, body in files.items():
        put_once(store, clock, mine.files[setting]["key"], body)
    if store.get(layout.RUN) is None:
        _refuse_headless(store, (layout.control_key(0), layout.claim_key(layout.slot_name(0), 1), *_TRAINED))
    won, stands, mine = _found_run(store, clock, mine, lambda: sizing.codec_of(config, store, clock, fleet.replicas))
    refuse_another(url, stands, mine, untouched=store.get(layout.commit_key(0)) is None)
    if parent is not None and parent != stands.parent:
        raise WrongRun(f"{url} goes on from {stands.parent}, not from {parent}. Use another --run, or leave --from out")
    set_desired(store, clock, fleet)
    return Run(url, raw, stands, resumed=not won)


def _found_run(
    store: Store, clock: Clock, mine: RunRecord, choose: Callable[[], tuple[str, str]]
) -> tuple[bool, RunRecord, RunRecord]:
    """Write run.json unless it stands; -> whether we were first, the record that stands, and ours to compare with it.

    codec = "auto" takes the codec that stands there; only a caller that finds no run chooses.
    """
    auto = mine.codec == AUTO
    if store.get(layout.RUN) is None:
        refuse_nested(store.url)
        mine = mine.with_codec(*choose()) if auto else mine
    won, value = put_once(store, clock, layout.RUN, mine.encode())
    stands = RunRecord.decode(value)
    return won, stands, mine.with_codec(stands.codec) if auto else mine


_TRAINED = (layout.commit_key(0), layout.snapshot_key(0))


def _refuse_headless(store: Store, later: Iterable[str]) -> None:
    """Raise RecordsLost if a later record stands, and run.json, which was missing, is still missing.

    later: keys of records that are only written after run.json.   Another process may be founding the run just now:
    run.json is always there before the others, so it is read last.
    """
    stands = next((key for key in later if store.get(key) is not None), None)
    if stands is not None and store.get(layout.RUN) is None:
        raise RecordsLost(
            f"{store.url}/{layout.RUN} has vanished, though {stands} is there. A new run founded here would take the "
            "old one's claims and steps for its own, so nothing was written. Restore the object (a bucket's versions, "
            "a backup) and take away whatever expires or deletes objects below this URL; or use another URL for a new "
            "run"
        )


def refuse_nested(url: str) -> None:
    """WrongRun if `url` lies inside a run: their objects would be taken for each other's.

    A folder or prefix above that may not be read, or is none, holds no run that we could disturb.
    """
    for above in urls_above(url):
        with suppress(StoreError, ValueError, OSError):
            store = open_store(above, make=False)
            if store.get(layout.RUN) is not None and not is_superseded(store):
                raise WrongRun(
                    f"{url} lies inside the run at {above}: what one writes, the other would take for its own. Use a "
                    "URL beside that run, or join it there"
                )


def agree_on_run(
    store: Store,
    clock: Clock,
    outer: Mapping[str, Any],
    parameters: list[list[Any]],
    *,
    frozen: str = "",
    replicas: int = 1,
) -> RunRecord:
    """Found or open a run as `open_run` does, for a loop that has no run.toml: by outer settings and parameter layout.

    outer: the settings of the outer step.   parameters: [name, shape, dtype] in flat order.   replicas: as wanted.
    frozen: digest of the weights and buffers that are not trained, "" for none.
    -> what stands: with the codec, if that is "auto".   Raises WrongRun.
    """
    from diloco import sizing

    count = sum(prod(shape) for _, shape, _ in parameters)
    seconds = sizing.compute_seconds(count, outer["sync_every"])
    mathematics = {"outer": dict(outer), "parameters": parameters, "frozen weights": frozen}
    mine = RunRecord({"name": "library", "outer": dict(outer)}, mathematics, {}, new_nonce(), clock.wall())
    choose = lambda: sizing.choose_codec(store, clock, count, replicas, seconds)  # noqa: E731
    if store.get(layout.RUN) is None:  # claims and control records come before run.json here
        _refuse_headless(store, _TRAINED)
    _, stands, mine = _found_run(store, clock, mine, choose)
    refuse_another(store.url, stands, mine)
    return stands


def solo_warning(desired: Wanted) -> str:
    """The warning for a run in which one replica alone may take an outer step; "" for others."""
    if desired.min_replicas > 1:
        return ""
    alone = "it is the only one" if desired.replicas == 1 else f"{desired.replicas} are wanted, any of them will do"
    return (
        f"min_replicas = 1: one replica alone may take an outer step ({alone}). No other replica confirms "
        "its θ, so bad memory would not be noticed; with --min-replicas 2 two of them must agree"
    )


def _refuse_unfit(store: Store, clock: Clock) -> None:
    """Raise StoreRefused before anything is written: without create-if-absent two replicas could commit one step."""
    from rendezvous.stores.race import why_unfit

    reason = why_unfit(store, clock)
    if reason is not None:
        raise StoreRefused(
            f"{store.url} cannot carry a run: {reason}. Use a store that has create-if-absent; "
            f"`diloco doctor {shlex.quote(store.url)}` shows more"
        )


def read_run(url: str) -> Run:
    """Open the run at `url`; ConfigError if there is none."""
    answers, store = _open_stores(url)
    return Run(url, store, decode_run(url, answers.get(layout.RUN) or b""))


def decode_run(url: str, body: bytes) -> RunRecord:
    """Read run.json.   Raises WireError with the run's URL and the next thing to do."""
    try:
        return RunRecord.decode(body)
    except WireError as error:
        raise WireError(
            f"{url}/{layout.RUN} cannot be read, and without it nothing of the run: {error}. If it is damaged, "
            "restore it from a backup; nothing was written"
        ) from error


def store_of(url: str) -> Store:
    """Open the store of the run at `url`, without decoding its run.json.   Raises ConfigError if there is none."""
    return _open_stores(url)[1]


def refuse_lost_run(run: Run, *, records: int, head: int) -> None:
    """Raise RecordsLost unless the run still stands in its store: run.json, and the newest records that were seen.

    records: of control/.   head: the first step without a commit.   Before this nothing may be called done.
    """
    body = run.store.get(layout.RUN)
    if body is None or decode_run(run.url, body).nonce != run.record.nonce:
        raise lost_record(run.url, layout.RUN, head, "is gone" if body is None else "is another run's")
    seen = [layout.control_key(records - 1)] * (records > 0) + [layout.commit_key(head - 1)] * (head > 0)
    for key in seen:
        if run.store.get(key) is None:
            raise lost_record(run.url, key, head)


OPENING = (layout.RUN, layout.SEAL)  # the records that say how a run is read


def _open_stores(url: str) -> tuple[Readable, Store]:
    """-> a store to read run.json from, and the run's."""
    bare = open_store(url, make=False)
    answers = Ahead(bare)
    answers.ask(OPENING)
    return open_under_seal(url, bare, answers)


def open_under_seal(url: str, bare: Store, answers: Ahead) -> tuple[Readable, Store]:
    """Do the same with answers read before.   answers: to OPENING.   Raises ConfigError if there is no run."""
    if not answers.is_there(layout.RUN):
        raise ConfigError(
            f"there is no run at {url} (no run.json). Check the path, or start one: "
            f"diloco train CONFIG --run {shlex.quote(url)}"
        )
    store = signed_store(bare, run_key(), answers.get(layout.SEAL))
    return store.reading_through(answers) if isinstance(store, SignedStore) else answers, store


def set_desired(store: Store, clock: Clock, fleet: FleetConfig) -> Wanted:
    """Write a control record with the operator's desired fleet, unless it stands and the run was not stopped."""
    stands = read_control(store)
    asked = {"replicas": fleet.replicas, "steps": fleet.steps, "min_replicas": fleet.quorum}
    news = {k: v for k, v in asked.items() if getattr(stands, k) != v or stands.records == 0}
    if not news and not stands.stop and not stands.drains:
        return stands
    if "steps" in news:
        refuse_fewer_steps(store, fleet.steps)
    elif is_finished(store, stands):
        return stands
    return write_control(store, clock, **news, resume=stands.stop or bool(stands.drains))


def is_finished(store: Readable, wanted: Wanted) -> bool:
    """Whether all wanted outer steps are committed."""
    return wanted.steps > 0 and store.get(layout.commit_key(wanted.steps - 1)) is not None


def refuse_fewer_steps(store: Store, steps: int) -> None:
    """Raise ConfigError where more outer steps are committed than are asked for."""
    if store.get(layout.commit_key(steps)) is None:
        return
    head = first_open_step(store, steps + 1)
    raise ConfigError(
        f"{head} outer steps are committed already, and steps = {steps} asks for fewer. It counts those of the whole "
        f"run: --steps {head + steps} for {steps} more"
    )


def refuse_another(url: str, stands: RunRecord, mine: RunRecord, *, untouched: bool = False) -> None:
    """Raise WrongRun with the differences if run.json describes other mathematics or other user files."""
    if differs := _list_differences(stands, mine):
        raise WrongRun(
            f"{url} holds a run with other mathematics: {'; '.join(differs)}. A run's mathematics never change; "
            "use another --run URL for this config, or the config that the run was started with. To go on from its "
            f"weights with this config: diloco train CONFIG --run NEW --from {shlex.quote(url)}"
            + (". Nothing was trained there yet: the same command with --again founds it anew" if untouched else "")
        )


def differing_settings(config: RunConfig, store: Store) -> list[str]:
    """The settings that differ between this config and the run that stands there; [] if none does."""
    stands = RunRecord.decode(store.get(layout.RUN) or b"")
    files = {setting: path.read_bytes() for setting, path in config.user_files().items()}
    mine = RunRecord(config.to_dict(), config.mathematics(), _file_records(config, files), new_nonce(), 0.0)
    return _list_differences(stands, mine.with_codec(stands.codec) if mine.codec == AUTO else mine)


def _list_differences(stands: RunRecord, mine: RunRecord) -> list[str]:
    differs = sorted(_differing_keys(stands.mathematics, mine.mathematics))
    for setting in sorted(set(stands.files) | set(mine.files)):
        there, here = (r.files.get(setting, {}).get("digest", "none") for r in (stands, mine))
        if there != here:
            there, here = (hex_of(d)[:8] or d for d in (there, here))
            name = _name_of_data(setting, stands, mine)
            differs.append(f"{setting} file (digest {there} there, {here} here{name})")
    return differs


def _name_of_data(setting: str, stands: RunRecord, mine: RunRecord) -> str:
    """ "" or how run.json calls it, with commits: a dataset's name may mean another commit now than then."""
    there, here = (_spelling(record, setting) for record in (stands, mine))
    return "" if there == here or "hub:" not in f"{there}" else f"; the run has {there!r}"


def _spelling(record: RunRecord, setting: str) -> Any:
    """Return the name of its prompts, or of [eval]'s, in a run's config; None for other files."""
    if setting == EVAL:
        return record.config.get("eval", {}).get("prompts")
    return record.config.get("inner", {}).get("data", {}).get(setting)


def refuse_layout(stands: list[list[Any]], mine: list[list[Any]]) -> None:
    """WrongRun if this replica's flat vectors would mean something else.   [name, shape, dtype] in flat order."""
    for at in range(max(len(stands), len(mine))):
        there, here = ([*parameters[at : at + 1], ["nothing", []]][0][:2] for parameters in (stands, mine))
        if there != here:
            raise WrongRun(
                f"this replica's model has another parameter layout than the run: parameter {at} is {here[0]} "
                f"{here[1]} here, {there[0]} {there[1]} in the run. Use the releases of torch and transformers that "
                "the run was started with"
            )


def _differing_keys(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key in set(there) | set(here):
        a = there.get(key)
        b = here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differing_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} is {a!r} there, {b!r} here")
    return found


def _file_records(config: RunConfig, files: Mapping[str, bytes]) -> dict[str, dict[str, str]]:
    paths = config.user_files()
    digests = {setting: digest(body, SHA256) for setting, body in files.items()}
    return {s: {"key": layout.code_key(hex_of(d), paths[s].name), "digest": d} for s, d in digests.items()}


# -------------------------------------------------------------------- θ₀


def publish(url: str) -> int:
    """Entry point of a child process: put θ₀ into the bucket unless it is there; -> an exit code."""
    from diloco import exitcodes
    from inner import InnerError

    clock = SystemClock()
    try:
        run = read_run(url)
        publish_model(replace(run, store=PatientStore(run.store, clock, PUBLISH_PATIENCE_S)), clock)
    except GaveUp as error:
        print(f"cannot publish the model: {error}", file=sys.stderr, flush=True)
        return exitcodes.GAVE_UP
    except (InnerError, ConfigError) as error:  # of the user's files and settings; the model is not to blame
        print(error, file=sys.stderr, flush=True)
        return exitcodes.USER_ERROR
    except (StoreError, OSError) as error:
        if isinstance(error, OSError) and is_full(error):
            words = f"{full_disk_words(error, 'it')}; free some, then `diloco resume RUN`"
            print(f"cannot publish the model: {words}", file=sys.stderr, flush=True)
            return exitcodes.GAVE_UP
        print(f"cannot publish the model: {error}", file=sys.stderr, flush=True)
        return exitcodes.USER_ERROR
    return exitcodes.DONE


def publish_model(run: Run, clock: Clock) -> ModelRecord:
    """Build or load the start model, check the user's code, upload what the Hub has not; the manifest goes last."""
    body = run.store.get(layout.MODEL_MANIFEST)
    if body is not None:
        return ModelRecord.decode(body)
    if run.record.parent.url:
        raise ConfigError(
            f"{run.url} goes on from {run.record.parent}, whose model was not copied to the end. Type the command "
            f"again that founded it: diloco train … --from {shlex.quote(str(run.record.parent))}"
        )
    import inner

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        files = fetch_files(run, folder / "code")
        inner.check_inner(run.config.inner, files)
        mine = _start_model(run, folder, clock)
        _check_start(run, files, folder)
    _, value = put_once(run.store, clock, layout.MODEL_MANIFEST, mine.encode())
    return ModelRecord.decode(value)


def _check_start(run: Run, files: Mapping[str, Path], scratch: Path) -> None:
    """Check a start model whose files were not on this machine before.

    Raises InnerError for a model that no replica could train."""
    config = run.config.inner
    if config.model in BUILT_IN_MODELS or Path(config.model).is_dir():
        return
    from inner.train.dry_run import check_start

    made, hub = scratch / "model", scratch / "hub"
    held_out = run.config.eval.source if run.config.eval is not None else None
    check_start(config, files, made if made.exists() else hub, held_out)


def _start_model(run: Run, scratch: Path, clock: Clock) -> ModelRecord:
    """Named, if every replica gets the same bits from the Hub; else carried."""
    from inner.models.hub_model import link_hub_files, pin_hub_model
    from inner.models.lora import ADAPTER, new_adapter, save_adapter
    from inner.train.build import load_start

    config = run.config.inner
    if (found := pin_hub_model(config)) is None:
        return _carry_model(run, config, scratch / "model", clock)
    folder = link_hub_files(found, scratch / "hub")
    model, drawn = load_start(folder, config.dtype)
    if drawn:  # weights that no file has: every replica would draw others
        return _carry_model(run, replace(config, model=str(folder), revision=None), scratch / "model", clock)
    files = {name: {"key": "", "digest": f"{SHA256}:{digits}"} for name, digits in found.files.items()}
    if config.lora is not None:
        model = new_adapter(model, config.lora, found.name, found.commit)
        save_adapter(model, scratch / "made" / ADAPTER)
        files |= _upload_folder(run.store, scratch / "made")
    return _describe_model(run, model, files, clock, {"model": found.name, "commit": found.commit})


def _carry_model(run: Run, config: "InnerConfig", folder: Path, clock: Clock) -> ModelRecord:
    import inner
    from inner.train.build import load_start

    inner.publish_model(config, folder)
    model, _ = load_start(folder, config.dtype, config.lora)
    return _describe_model(run, model, _upload_folder(run.store, folder), clock)


def _describe_model(
    run: Run, model: Any, files: dict[str, dict[str, str]], clock: Clock, hub: Mapping[str, str] | None = None
) -> ModelRecord:
    from diloco.flat import layout_of
    from diloco.model_checks import frozen_digest
    from diloco.start_model import theta_digest

    theta = theta_digest(model, required_digest_kind(run.store))
    base = frozen_digest(model) if run.config.inner.lora is not None else ""
    return ModelRecord(files, layout_of(model), new_nonce(), clock.wall(), hub=dict(hub or {}), theta=theta, base=base)


def _upload_folder(store: Store, folder: Path) -> dict[str, dict[str, str]]:
    mark = new_nonce()
    files: dict[str, dict[str, str]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        body = path.read_bytes()
        files[name] = {"key": layout.model_file(f"{mark}/{name}"), "digest": digest(body, SHA256)}
        store.put(files[name]["key"], body)
    return files


def fetch_model(store: Store, record: ModelRecord, folder: Path) -> Path:
    """θ₀'s folder, from the bucket or from the Hub; -> `folder`, a normal from_pretrained folder.   Raises HubError."""
    if (model := record.hub_model) is not None:
        from inner.models.hub_model import link_hub_files

        link_hub_files(model, folder)
    for name, stored in record.files.items():
        if stored["key"]:
            save_below(folder, name, fetch_stored(store, stored))
    return folder


def fetch_model_without_weights(store: Store, record: ModelRecord, folder: Path) -> Path:
    """Write θ₀'s folder with zeros for weights, for a replica whose θ comes from a snapshot; -> `folder`.

    Raises HubError.   It is a from_pretrained folder, so the rest of the model is made as ever.   The zeros are a hole
    in a file: neither the link nor the disk carries them.
    """
    from diloco.zeros import write_zeros

    others = {name: stored for name, stored in record.files.items() if not is_weights_file(name)}
    fetch_model(store, replace(record, files=others), folder)
    write_zeros(folder / "model.safetensors", record.layout)
    return folder


def is_weights_file(name: str) -> bool:
    """Whether a start model's file holds weights or their index: safetensors, or PyTorch's own on the Hub."""
    return name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"))


def fetch_files(run: Run, folder: Path) -> dict[str, Path]:
    """Download the user's own files, checked against run.json; -> setting -> local path."""
    local: dict[str, Path] = {}
    for setting, stored in run.record.files.items():
        name = f"{hex_of(stored['digest'])}/{stored['key'].rpartition('/')[2]}"
        local[setting] = save_below(folder, name, fetch_stored(run.store, stored))
    return local


def fetch_stored(store: Store, stored: Mapping[str, str]) -> bytes:
    """Return the very bytes that were checked, not those of a second read.   stored: key and digest.

    Raises Corrupt after three reads without those bytes."""
    body: bytes | None = None
    for _ in range(3):
        body = store.get(stored["key"])
        if body is not None and has_digest(body, stored["digest"], SHA256):
            return body
    raise Corrupt(
        f"{stored['key']} is missing or damaged: announced digest {stored['digest']}, "
        f"found {'nothing' if body is None else digest(body, SHA256)}. Restore it, or start a new run"
    )


def save_below(folder: Path, name: str, body: bytes) -> Path:
    """Write folder/name; -> its path.   Raises BadKey if that is not in `folder`, by its name or by a link."""
    path = folder / plain_key(name)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BadKey(f"{name!r} leads out of {folder}, through a link that lies there; use an empty folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path

"""run.toml in, one frozen object out; the same object goes into the bucket as run.json.

    run.toml ──▶ RunConfig ── mathematics() ──▶ run.json, for ever      what the run computes
                  │  └─────── fleet ──────────▶ control/000000.json     what the operator wants now
                  └ OuterConfig ── rules ─────▶ rendezvous              what a commit is decided by
                        ▲
    make_diloco(…) ─────┘   the same object, checked where it is made

Two commands with equal mathematics are the same run; `fleet` may differ from one to the next.
Unknown or contradictory settings are errors that name the next thing to do.  No torch here.
"""

import difflib
import math
import numbers
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from inner import InnerConfig, InnerError
from rendezvous.codecs import NAMES as CODECS
from rendezvous.rules import WEIGHTINGS, Rules, Timing

AUTO = "auto"  # a codec that is chosen when the run is founded (diloco/sizing.py)
BUCKET = "bucket"
USER_FILES = ("reward", "environment", "prompts", "pairs", "text")  # settings of [inner] that name a file
NOT_LEARNED = ("reward_retries", "reward_timeout_s")  # settings of [inner] that change nothing of what is learned


class ConfigError(ValueError):
    """The configuration cannot be run as it stands."""


class OuterError(RuntimeError):
    """The model or the settings do not fit the outer loop."""


class OuterConfigError(ConfigError, OuterError):
    """A setting of the outer step is none: a ConfigError for a run.toml, an OuterError for who calls make_diloco."""


@dataclass(frozen=True)
class OuterConfig:
    """DiLoCo (arXiv 2311.08105) with Streaming DiLoCo's fragments (arXiv 2501.18512); torchft's names.

    sync_every: H, inner steps inside a full pseudogradient.   fragments: F; one of them is synchronised every H/F.
    fragment_sync_delay: τ, inner steps between sending a fragment and applying it.
    fragment_update_alpha: α, how much of the local value a fragment keeps when it is applied (0: none).
    lr, momentum: of the Nesterov outer step.   lr = "auto": as large as the likeness of successive means allows.
    codec: how pseudogradients travel: fp32, bf16, int8, int4, topk or bf16-gate, the lossy ones with error feedback;
    auto: the first of them whose sync takes a tenth of the time between syncs, chosen when the run is founded.
    max_carry, age_discount: how long a late pseudogradient may wait to be listed, and what it is worth per sync.
    weighting: what a pseudogradient counts by: its inner "steps", its "samples", or "uniform".
    norm_gate: one that is so many times longer than others counts as one of typical length (0: whatever it is).
    sync_seconds: a sync is due after that long, if not sync_every inner steps come first.

    This is the only declaration of these settings and their only check, for run.toml and for `make_diloco`.
    Raises OuterConfigError.  An int does for a float; a bool is no number.
    """

    sync_every: int = 10
    fragments: int = 1
    fragment_sync_delay: int = 0
    fragment_update_alpha: float = 0.0
    lr: float | str = 0.7
    momentum: float = 0.5
    max_carry: int = 2
    age_discount: float = 0.5
    snapshot_every: int = 10
    codec: str = "fp32"
    weighting: str = "steps"
    norm_gate: float = 10.0
    sync_seconds: float | None = None

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for f in fields(self):
            value = _as_type(getattr(self, f.name), hints[f.name], f"outer.{f.name}", OuterConfigError)
            if isinstance(value, int) and value.bit_length() > 53:
                raise OuterConfigError(f"outer.{f.name} is an integer of {value.bit_length()} bits; use at most 53")
            object.__setattr__(self, f.name, value)  # as what it is declared: 1 becomes 1.0
        _check_schedule(self)
        _check_step(self)
        _check_weighing(self)

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "OuterConfig":
        """From settings by name.   Raises OuterConfigError for a name that is none, with the nearest one."""
        _refuse_unknown(cls, table, "outer.", OuterConfigError)
        return cls(**table)

    @property
    def rules(self) -> Rules:
        """The part of these settings by which the rendezvous decides commits."""
        return Rules(
            fragments=self.fragments, sync_every=self.sync_every, max_carry=self.max_carry,
            age_discount=self.age_discount, snapshot_every=self.snapshot_every, codec=self.codec,
            weighting=self.weighting, norm_gate=self.norm_gate, sync_seconds=self.sync_seconds or 0.0,
        )  # fmt: skip


@dataclass(frozen=True)
class FleetConfig:
    """The operator's desired fleet when the run starts; each setting may change later without touching the mathematics.

    replicas: how many to keep running.   steps: outer steps in all.
    min_replicas: fresh pseudogradients without which no outer step is taken (default min(2, replicas)).
    keep: bytes of pseudogradients, means and snapshots that stay in the bucket: "20 GB", "500 MB", a number, "all", or
    "window" for no more than what the last two snapshots need, which always stays (rendezvous/keeping.py).  The
    default is "all" with [inner.lora].
    give_up_s: seconds without progress after which a replica exits, resumable.
    hung_after_s: seconds without an inner step after which a replica may count as hung and is started again; ten times
    its median step and three times its longest, if that is more (diloco/watchdog.py); 0 for never.
    log_rollouts: how many rollouts each replica writes down per outer step, for `diloco traces` (0: none).
    """

    replicas: int = 3
    steps: int = 10
    min_replicas: int | None = None
    keep: int | str = "20 GB"
    give_up_s: float = 600.0
    start_patience_s: float = 30.0
    hung_after_s: float = 600.0
    log_rollouts: int = 4

    @property
    def quorum(self) -> int:
        return min(2, self.replicas) if self.min_replicas is None else self.min_replicas

    @property
    def timing(self) -> Timing:
        return Timing(give_up=self.give_up_s, start_patience=self.start_patience_s)


@dataclass(frozen=True)
class RunConfig:
    """One run.   folder: where relative paths in [inner] start (not part of the run).

    rendezvous: "bucket", or lighthouse://host:port where replicas can reach each other (torchft's Manager, Gloo).
    """

    name: str = "run"
    seed: int = 0
    rendezvous: str = BUCKET
    outer: OuterConfig = field(default_factory=OuterConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    folder: Path = field(default=Path(), compare=False)

    def mathematics(self) -> dict[str, Any]:
        """The settings that may never change under one URL: digests of the user's files, not their names."""
        inner = {k: v for k, v in self.inner.to_dict().items() if k not in (*USER_FILES, *NOT_LEARNED)}
        entry_points = {k: _entry_point(getattr(self.inner, k)) for k in USER_FILES if getattr(self.inner, k)}
        fixed = {"seed": self.seed, "outer": asdict(self.outer), "inner": inner, "entry_points": entry_points}
        return fixed if self.rendezvous == BUCKET else {**fixed, "rendezvous": "lighthouse"}  # wherever that one is

    def to_dict(self) -> dict[str, Any]:
        parts = {"outer": asdict(self.outer), "inner": self.inner.to_dict(), "fleet": asdict(self.fleet)}
        return {"name": self.name, "seed": self.seed, "rendezvous": self.rendezvous, **parts}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], folder: Path = Path()) -> "RunConfig":
        """Raises ConfigError."""
        sections = {"outer": OuterConfig, "inner": InnerConfig, "fleet": FleetConfig}
        values = _check_values(cls, {k: v for k, v in raw.items() if k not in sections}, "", extra=sections)
        for name, section in sections.items():
            table = raw.get(name, {})
            if not isinstance(table, Mapping):
                raise ConfigError(f"[{name}] must be a table, found {table!r}")
            if section is FleetConfig:
                table = _with_keep(table, adapter=values["inner"].lora is not None)
            values[name] = _build_section(section, table, name)
        config = cls(**values, folder=folder)
        config.check()
        return config

    def user_files(self) -> dict[str, Path]:
        """Setting -> path of the file that it names; for reward and environment the part before the colon."""
        named = {k: getattr(self.inner, k) for k in USER_FILES if getattr(self.inner, k)}
        return {k: self.folder / v.rpartition(":")[0] if k in ("reward", "environment") else self.folder / v
                for k, v in named.items()}  # fmt: skip

    def check(self) -> None:
        """Contradictions between settings; the single sections check themselves."""
        check_boundary(self.outer, self.inner.boundary)
        _check_rendezvous(self.rendezvous, self.outer)
        check_fleet(self.fleet)
        for setting, path in self.user_files().items():
            if not path.is_file():
                raise ConfigError(f"inner.{setting}: there is no file {path}. Give a path relative to the config file")


def load_config(path: str | Path) -> RunConfig:
    """Read a run.toml.  Raises ConfigError with the reason and the next thing to do."""
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}. `diloco demo` shows a working one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}") from error
    if not raw:
        raise ConfigError(f"{path} is empty: it names no model and no data. `diloco demo` writes one that works")
    try:
        return RunConfig.from_dict(raw, path.parent)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_schedule(outer: OuterConfig) -> None:
    h = outer.sync_every
    f = outer.fragments
    delay = outer.fragment_sync_delay
    if h < 1 or f < 1:
        raise OuterConfigError(f"outer.sync_every = {h} and outer.fragments = {f} must be at least 1")
    if h % f:
        raise OuterConfigError(
            f"outer.sync_every = {h} is not divisible by outer.fragments = {f}: each needs its turn after the "
            f"same number of inner steps. Use sync_every = {f * max(1, (h + f // 2) // f)} or other fragments"
        )
    if not 0 <= delay < h // f:
        raise OuterConfigError(
            f"outer.fragment_sync_delay = {delay} must be at least 0 and below sync_every/fragments = {h // f}"
        )
    if not 0 <= outer.fragment_update_alpha <= 1:
        raise OuterConfigError(f"outer.fragment_update_alpha = {outer.fragment_update_alpha} must lie in [0, 1]")
    if outer.sync_seconds is not None and not 0 < outer.sync_seconds < math.inf:
        raise OuterConfigError(
            f"outer.sync_seconds = {outer.sync_seconds} must be above 0 and finite; without it, there is no such limit"
        )
    if outer.snapshot_every < 1:
        raise OuterConfigError(f"outer.snapshot_every = {outer.snapshot_every} must be at least 1")


def _check_step(outer: OuterConfig) -> None:
    if isinstance(outer.lr, str) and outer.lr != "auto":
        raise OuterConfigError(f'outer.lr = {outer.lr!r} is no number. "auto" is the only word for it')
    if not isinstance(outer.lr, str) and not 0 < outer.lr < math.inf:
        raise OuterConfigError(f"outer.lr = {outer.lr} must be above 0 and finite")
    if not 0 <= outer.momentum < 1:
        raise OuterConfigError(f"outer.momentum = {outer.momentum} must be at least 0 and below 1")
    if outer.codec not in (*CODECS, AUTO):
        raise OuterConfigError(f"outer.codec = {outer.codec!r} is not known. Use one of: {', '.join(CODECS)}, {AUTO}")


def _check_weighing(outer: OuterConfig) -> None:
    if outer.weighting not in WEIGHTINGS:
        raise OuterConfigError(
            f"outer.weighting = {outer.weighting!r} is not known. Use one of: {', '.join(WEIGHTINGS)}"
        )
    if outer.norm_gate != 0 and not 2 <= outer.norm_gate < math.inf:
        raise OuterConfigError(
            f"outer.norm_gate = {outer.norm_gate} would damp honest replicas: it is a multiple of the typical length. "
            "Use at least 2, or 0 for no gate"
        )
    if outer.max_carry < 0:
        raise OuterConfigError(f"outer.max_carry = {outer.max_carry} must be at least 0")
    if not 0 <= outer.age_discount <= 1:
        raise OuterConfigError(f"outer.age_discount = {outer.age_discount} must lie in [0, 1]")


def check_boundary(outer: OuterConfig, boundary: int) -> None:
    """A sync must not fall inside a generation batch.   boundary: inner steps of one.   Raises OuterConfigError."""
    interval = outer.sync_every // outer.fragments
    if boundary < 1 or interval % boundary:
        raise OuterConfigError(
            f"a sync every {interval} inner steps would fall inside a generation batch, which lasts {boundary} "
            "(steps_per_generation × num_iterations / gradient_accumulation_steps). "
            f"Make sync_every a multiple of {outer.fragments * max(1, boundary)}"
        )


def check_lighthouse(outer: OuterConfig) -> None:
    """Gloo sends fp32, and replicas there do not say how many samples they have.   Raises OuterConfigError."""
    if outer.codec != "fp32":
        raise OuterConfigError(
            f'outer.codec = {outer.codec!r} is for the bucket; Gloo sends fp32. Use "fp32" with a lighthouse'
        )
    if outer.weighting == "samples":
        raise OuterConfigError(
            'outer.weighting = "samples" is for the bucket. Use "steps" or "uniform" with a lighthouse'
        )
    for name in ("norm_gate", "max_carry", "age_discount"):
        value = getattr(outer, name)
        usual = getattr(OuterConfig(), name)
        if value not in (usual, 0):  # 0 is what a lighthouse does
            raise OuterConfigError(
                f"outer.{name} = {value:g} is for the bucket: over a lighthouse nothing is damped, and nothing late "
                "counts. Leave the line away, or use the bucket"
            )


def _check_rendezvous(rendezvous: str, outer: OuterConfig) -> None:
    if rendezvous == BUCKET:
        return
    if not re.fullmatch(r"lighthouse://(\[[0-9a-fA-F:]+\]|[^:/@\s]+):\d+", rendezvous):
        raise ConfigError(
            f'rendezvous = {rendezvous!r} is not known. Use "bucket" (or no line), or lighthouse://host:port'
        )
    check_lighthouse(outer)


def keep_bytes(keep: int | str) -> int | None:
    """ "20 GB" -> 20_000_000_000; "all" -> None; "window" -> 0.   Raises ConfigError."""
    text = str(keep).strip()
    if text in ("all", "window"):
        return None if text == "all" else 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|[kMGT]i?B|)", text)
    if found is None or isinstance(keep, bool):
        raise ConfigError(
            f'fleet.keep = {keep!r} is not known. Use a size such as "20 GB" or "500 MB", "all" or "window"'
        )
    unit = found[2]
    power = " kMGT".index(unit[0]) if unit not in ("", "B") else 0
    return int(float(found[1]) * (1024 if "i" in unit else 1000) ** power)


def _with_keep(fleet: Mapping[str, Any], *, adapter: bool) -> dict[str, Any]:
    """`fleet.retention`, in a run.toml or run.json of an earlier release, said the same of "all" and "window".

    A run of an adapter is small: all of it stays if nothing else is said.
    """
    rest = {k: v for k, v in fleet.items() if k != "retention"}
    default = {"keep": "all"} if adapter else {}
    return {**default, **({"keep": fleet["retention"]} if "retention" in fleet else {}), **rest}


def check_fleet(fleet: FleetConfig) -> None:
    """Raises ConfigError for a desired fleet that no run could have."""
    if fleet.replicas < 1 or fleet.steps < 1:
        raise ConfigError(f"fleet.replicas = {fleet.replicas} and fleet.steps = {fleet.steps} must be at least 1")
    keep_bytes(fleet.keep)
    if not 0 <= fleet.log_rollouts <= 64:
        raise ConfigError(
            f"fleet.log_rollouts = {fleet.log_rollouts} must be 0 to 64: it is a sample, per replica and outer step"
        )
    if not 0 <= fleet.hung_after_s < math.inf:
        raise ConfigError(f"fleet.hung_after_s = {fleet.hung_after_s} must be a number of seconds, 0 for never")
    if not 1 <= fleet.quorum <= fleet.replicas:
        raise ConfigError(
            f"fleet.min_replicas = {fleet.quorum} with fleet.replicas = {fleet.replicas}: no outer step could ever be "
            f"taken. Use a number from 1 to {fleet.replicas}"
        )


def _build_section(section: type, table: Mapping[str, Any], name: str) -> Any:
    if section is OuterConfig:
        return OuterConfig.of(table)
    try:
        return section(**_check_values(section, table, f"{name}."))
    except InnerError as error:
        raise ConfigError(str(error)) from error


def _check_values(cls: type, table: Mapping[str, Any], prefix: str, extra: typing.Iterable[str] = ()) -> dict[str, Any]:
    """The table's values, each known and of its type (an int does for a float)."""
    hints = _refuse_unknown(cls, table, prefix, ConfigError, extra)
    return {k: _as_type(v, hints[k], f"{prefix}{k}", ConfigError) for k, v in table.items()}


def _refuse_unknown(
    cls: type, table: Mapping[str, Any], prefix: str, error: type[ConfigError], extra: typing.Iterable[str] = ()
) -> dict[str, Any]:
    """-> the type of each setting of `cls`."""
    hints = typing.get_type_hints(cls)
    known = {f.name: hints[f.name] for f in fields(cls) if f.name != "folder" and not is_dataclass(hints[f.name])}
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, [*known, *extra], n=1)
            advice = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(sorted([*known, *extra]))}"
            raise error(f"unknown setting {prefix}{key}; {advice}")
    return known


def _as_type(value: Any, hint: Any, name: str, error: type[ConfigError]) -> Any:
    """The value as its type: any int or real number (numpy's, too) does for a float, a bool for neither."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, Mapping) and (tables := [o for o in options if isinstance(o, type) and is_dataclass(o)]):
        return _build_section(tables[0], value, name)
    if type(value) in options or (value is None and type(None) in options):
        return value
    if int in options and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if float in options and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return _as_float(value)
    allowed = " or ".join("nothing" if o is type(None) else o.__name__ for o in options)
    raise error(f"{name} = {value!r} must be {allowed}, not {type(value).__name__}")


def _as_float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an int of 400 digits: as much out of range as infinity
        return math.inf


def _entry_point(value: str) -> str:
    """ "rewards.py:exact" -> "exact"; a data file has none."""
    return value.rpartition(":")[2] if ":" in value else ""

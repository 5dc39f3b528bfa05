"""Read run.toml into one frozen object; the same object is stored in the bucket as run.json.

    run.toml ──▶ RunConfig ── mathematics() ──▶ run.json, for ever      settings that determine the result
                  │  └─────── fleet ──────────▶ control/000000.json     the operator's desired state
                  └ OuterConfig ── rules ─────▶ rendezvous              the rules for commits
                        ▲
    make_diloco(…) ─────┘   the same object, checked where it is made

Two commands with equal mathematics belong to the same run; their `fleet` may differ.
Unknown or contradictory settings are errors that name the next thing to do.  This file does not import torch.
"""

import hashlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from diloco.run.sections import TASK_ONLY, ConfigError, EvalConfig, FleetConfig, LogConfig, OuterConfigError, with_keep
from diloco.run.sections import OuterError as OuterError
from inner import InnerConfig, InnerError
from inner.settings.inner import BUILT_IN_MODELS
from inner.settings.tables import Table, as_type, field_types, refuse_unknown, setting
from inner.settings.task import EVAL, FILE_SETTINGS, MODULES, entry_point, is_code, is_one_file, setting_of
from inner.tasks.spec import is_task
from rendezvous.agreement.rules import WEIGHTINGS, Rules
from rendezvous.codecs import NAMES as CODECS

AUTO = "auto"  # a codec that is chosen when the run is created (diloco/run/sizing.py)
BUCKET = "bucket"
# settings of [inner] without an effect on the learned weights
NOT_LEARNED = ("rewards.retries", "rewards.timeout_s", "vllm.memory", "vllm.sleep")


@dataclass(frozen=True)
class OuterConfig(Table):
    """The outer step: DiLoCo (arXiv 2311.08105) with Streaming DiLoCo's fragments (arXiv 2501.18512); torchft's names.

    This is the only declaration of these settings and their only check, for run.toml and for `make_diloco`.
    Raises OuterConfigError.  A float may be given as an int; a bool is not a number.
    """

    path: ClassVar[str] = "outer"
    error: ClassVar[type[Exception]] = OuterConfigError

    sync_every: int = setting(10, "H: inner steps inside a full pseudogradient.", least=1)
    fragments: int = setting(1, "F: parts of the model; replicas sync one part every H/F inner steps.", least=1)
    fragment_sync_delay: int = setting(0, "τ: inner steps between sending a fragment and applying it.", least=0)
    fragment_update_alpha: float = setting(
        0.0, "α: how much of its local value a fragment keeps when a mean is applied (0: none).", least=0, most=1
    )
    lr: float | str = setting(
        0.7,
        'Learning rate η of the outer Nesterov step; "auto": larger if successive means are less alike.',
        above=0,
    )
    momentum: float = setting(0.5, "Momentum μ of the outer Nesterov step.", least=0, below=1)
    max_carry: int = setting(2, "Syncs that a late pseudogradient may wait to be listed.", least=0)
    age_discount: float = setting(
        0.5, "Factor of a late pseudogradient's weight, for each sync that it is late.", least=0, most=1
    )
    snapshot_every: int = setting(10, "Outer steps from one snapshot of θ and the momentum to the next.", least=1)
    codec: str = setting(
        "fp32",
        f"Format of pseudogradients: {', '.join(CODECS)} (lossy: with error feedback). auto: chosen once for a run, "
        "the first format (not bf16-gate) whose sync takes at most a tenth of the time between syncs, or the fastest.",
        one_of=(*CODECS, AUTO),
    )
    weighting: str = setting(
        "steps", 'Weight of a pseudogradient: by inner "steps", by "samples", or "uniform".', one_of=WEIGHTINGS
    )
    norm_gate: float = setting(
        10.0, "A pseudogradient longer than norm_gate × the typical length is scaled to the typical length; 0: off.",
        least=0,
    )  # fmt: skip
    sync_seconds: float | None = setting(
        None, "A sync is due after that many seconds, or after sync_every inner steps, whichever is first.", above=0
    )

    def check(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int) and value.bit_length() > 53:
                raise OuterConfigError(f"outer.{f.name} is an integer of {value.bit_length()} bits; use at most 53")
        _check_turns(self)
        if isinstance(self.lr, str) and self.lr != "auto":
            raise OuterConfigError(f'outer.lr = {self.lr!r} is not a number. The only text allowed is "auto"')
        if 0 < self.norm_gate < 2:
            raise OuterConfigError(
                f"outer.norm_gate = {self.norm_gate} would damp sound replicas, too: it is a multiple of the typical "
                "length. Use at least 2, or 0 for no gate"
            )

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "OuterConfig":
        """Make an OuterConfig from settings by name.   Raises OuterConfigError, which proposes the nearest name."""
        return cls.from_dict(table)

    @property
    def interval(self) -> int:
        """The inner steps of one outer step, which steps one fragment: H / F."""
        return self.sync_every // self.fragments

    @property
    def rules(self) -> Rules:
        """The part of these settings by which the rendezvous decides commits."""
        return Rules(
            fragments=self.fragments, sync_every=self.sync_every, max_carry=self.max_carry,
            age_discount=self.age_discount, snapshot_every=self.snapshot_every, codec=self.codec,
            weighting=self.weighting, norm_gate=self.norm_gate, sync_seconds=self.sync_seconds or 0.0,
        )  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """The config of one run.   folder: base of relative paths in [inner] (not part of the run).

    gathered: kind -> the single file that `gather_data` made from prompts (several files, the Hub, a task) or from
    the modules that the user's code imports.
    overrides: dotted name -> value of `--set`, which replaces the file's value; run.json lists them.
    """

    name: str = setting("run", "Name of the run in `status` and in the report.")
    seed: int = setting(0, "Seed of data order and sampling; each slot and session derives its own seed.")
    rendezvous: str = setting(
        "bucket",
        '"bucket", or lighthouse://host:port where replicas can reach each other (torchft\'s Manager, Gloo).',
    )
    outer: OuterConfig = field(default_factory=OuterConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    log: LogConfig = field(default_factory=LogConfig)
    eval: EvalConfig | None = None
    folder: Path = field(default=Path(), compare=False)
    gathered: Mapping[str, Path] = field(default_factory=dict, compare=False)
    overrides: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def script(self) -> Any:
        """The user's own script in the place of [inner] (diloco/run/script.py); None for a run.toml."""
        return None

    def mathematics(self) -> dict[str, Any]:
        """Return the settings that may never change under one URL. The names of user files may."""
        inner = without_settings(self.inner.to_dict(), (*FILE_SETTINGS.values(), "rewards.functions", *NOT_LEARNED))
        entry_points = {
            kind: entry_point(name) if is_code(kind) else ""
            for kind, name in self._named_files().items()
            if kind not in (EVAL, MODULES)
        }
        fixed = {"seed": self.seed, "outer": asdict(self.outer), "inner": inner, "entry_points": entry_points}
        if weights := self.inner.rewards.weights:  # function -> weight; the functions' files count by digests
            fixed["reward_weights"] = weights
        if models := self.inner.rewards.models:
            fixed["reward_models"] = models
        if self.eval is not None:  # changes no weight, but with other settings the run's curve would break
            unnamed = ("prompts",) if self.eval.task else ("prompts", "task", *TASK_ONLY)
            fixed["eval"] = {k: v for k, v in self.eval.to_dict().items() if k not in unnamed}
        return fixed if self.rendezvous == BUCKET else {**fixed, "rendezvous": "lighthouse"}  # its address may change

    @property
    def hung_after_s(self) -> float:
        """Seconds without an inner step after which a replica may count as hung, 0 for never.

        A tool, an environment or an agent may use up its own limit twice, because a step may call it several times."""
        sampling, own = self.inner.sampling, self.fleet.hung_after_s
        limits = sampling.tool_timeout_s, sampling.environment_timeout_s, sampling.agent and sampling.agent_timeout_s
        return own and max(own, *(2 * (limit or 0.0) for limit in limits))

    def to_dict(self) -> dict[str, Any]:
        parts = {"outer": asdict(self.outer), "inner": self.inner.to_dict(), "fleet": asdict(self.fleet)}
        parts |= {"log": asdict(self.log)} if self.log.to else {}
        parts |= {"eval": self.eval.to_dict()} if self.eval is not None else {}
        overrides = {"overrides": dict(self.overrides)} if self.overrides else {}
        return {"name": self.name, "seed": self.seed, "rendezvous": self.rendezvous, **parts, **overrides}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], folder: Path = Path()) -> "RunConfig":
        """Make the config from the tables of a run.toml.   Raises ConfigError."""
        raw = with_keep(raw)
        _refuse_unknown(raw)
        hints = field_types(cls)
        try:
            config = cls(**{k: as_type(v, hints[k], k, ConfigError) for k, v in raw.items()}, folder=folder)
        except InnerError as error:
            raise ConfigError(str(error)) from error
        config.check()
        return config

    def user_files(self) -> dict[str, Path]:
        """Return kind -> path of the user's file; for rewards and environment, the part before the colon.

        Raises ConfigError for prompts that are not a single file before `gather_data`."""
        return {kind: self.path_of(kind, name) for kind, name in self._named_files().items()}

    def path_of(self, kind: str, name: Any) -> Path:
        """Return the path of the user's file of this kind.   name: the file's name in the config."""
        if kind in self.gathered:
            return self.gathered[kind]
        if not is_one_file(name):
            raise ConfigError(
                f"{setting_of(kind, name)} = {name!r} is not a single file yet. Call gather_data(config) first"
            )
        return self.folder / (name.rpartition(":")[0] if is_code(kind) else name)

    def _named_files(self) -> dict[str, Any]:
        named = self.inner.named_files
        named |= {MODULES: "modules.zip"} if MODULES in self.gathered else {}
        return named if self.eval is None else {**named, EVAL: self.eval.source}

    def check(self) -> None:
        """Raise ConfigError for contradictions between sections; each section checks itself."""
        check_boundary(self.outer, self.inner.boundary)
        if self.rendezvous != BUCKET:
            from diloco.run.combinations import check_rendezvous

            check_rendezvous(self.rendezvous, self.outer, OuterConfig(), broadcasts=self.fleet.broadcast_weights)
        if self.eval is not None and self.inner.loop == "supervised":
            raise ConfigError('[eval] asks for rewards, and loop = "supervised" has none. Leave [eval] out')
        if self.inner.data.columns:
            from diloco.run.combinations import check_columns

            check_columns(self)
        self.check_files()

    def check_files(self) -> None:
        """Raise ConfigError if a user file is missing or a dataset's name is not valid."""
        for kind, named in self._named_files().items():
            for name in named if isinstance(named, list) else [named]:
                self._check_source(kind, name)

    def _check_source(self, kind: str, name: str) -> None:
        if is_one_file(name):
            if not (path := self.path_of(kind, name)).is_file():
                from diloco.unreadable import absent_words

                raise ConfigError(absent_words(kind, name, path, self.folder))
            return
        if is_task(name):
            return  # the table has checked the name; `gather_data` checks the package
        from inner.data.hub_data import HubDataset

        try:
            HubDataset.parse(name, setting_of(kind))
        except InnerError as error:
            raise ConfigError(str(error)) from error


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    refuse_unknown(raw, RunConfig, error=ConfigError, prefix="")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run.toml.  Raises ConfigError with the reason and the next thing to do.

    overrides: "inner.lr=2e-6", …: settings that replace the file's (`--set`).
    """
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        from diloco.unreadable import toml_fault

        raise ConfigError(toml_fault(path, error)) from error
    if not raw:
        raise ConfigError(f"{path} is empty: it names no model and no data. `diloco demo` writes one that works")
    changes: dict[str, Any] = {}
    if overrides:
        from diloco.run.overrides import read_overrides, with_overrides

        changes = read_overrides(overrides, _refuse_unknown)
        raw = with_overrides(raw, changes)
    try:
        config = RunConfig.from_dict(raw, path.parent)
        if config.inner.model not in BUILT_IN_MODELS:
            from diloco.run.overrides import model_beside

            config = replace(config, inner=model_beside(config.inner, path.parent))
        return replace(config, overrides=changes)
    except ConfigError as error:
        with_changes = f" with --set {' --set '.join(overrides)}" if overrides else ""
        raise ConfigError(f"{path}{with_changes}: {error}") from None


def _check_turns(outer: OuterConfig) -> None:
    """Raise OuterConfigError unless H is a multiple of F, and the delay is below H/F."""
    h, f, delay = outer.sync_every, outer.fragments, outer.fragment_sync_delay
    if h % f:
        raise OuterConfigError(
            f"outer.sync_every = {h} is not divisible by outer.fragments = {f}: each fragment has its turn after the "
            f"same number of inner steps. Use sync_every = {f * max(1, (h + f // 2) // f)} or other fragments"
        )
    if delay >= h // f:
        raise OuterConfigError(f"outer.fragment_sync_delay = {delay} must be below sync_every/fragments = {h // f}")


def cut_fragments(sizes: Sequence[int], fragments: int) -> list[slice]:
    """Cut consecutive parameters into `fragments` slices of about equal numbers of elements.

        sizes of parameters    w₀ │ w₁ │ w₂ ┊ w₃ │ w₄        in flat order; a parameter is never cut
        F = 2                  [ ─────────── ] [ ─────── ]

    Not promised: equal fragments, as one parameter may be large.   Raises OuterError.
    """
    if fragments > len(sizes):
        raise OuterError(f"{fragments} fragments cannot be cut from {len(sizes)} trainable parameters; use fewer")
    parts: list[slice] = []
    at = 0
    left = sum(sizes)
    for remaining in range(fragments, 0, -1):
        goal = left / remaining
        to = at + 1
        size = sizes[at]
        while to <= len(sizes) - remaining and (remaining == 1 or size + sizes[to] / 2 <= goal):
            size += sizes[to]
            to += 1
        parts.append(slice(at, to))
        at = to
        left -= size
    return parts


def check_boundary(outer: OuterConfig, boundary: int) -> None:
    """Raise OuterConfigError if a sync falls inside a generation batch.   boundary: inner steps of one batch."""
    if boundary < 1 or outer.interval % boundary:
        raise OuterConfigError(
            f"a sync every {outer.interval} inner steps would fall inside a generation batch, which lasts {boundary} "
            "(steps_per_generation × num_iterations / gradient_accumulation_steps). "
            f"Make sync_every a multiple of {outer.fragments * max(1, boundary)}"
        )


def without_settings(inner: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the tables of [inner] without these settings.   names: "table.key"."""
    left = {k: dict(v) if isinstance(v, Mapping) else v for k, v in inner.items()}
    for name in names:
        table, _, key = name.partition(".")
        if left[table] is not None:
            left[table].pop(key, None)
    return left


def derive_seed(*parts: object) -> int:
    """Return 0 ≤ seed < 2³¹: the first 31 bits of a SHA-256 of the run's seed, the slot, the generation, …

    Equal parts give equal seeds on every machine and in every session.  Not promised: different seeds; among millions
    of them, some are equal.
    """
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little") >> 1

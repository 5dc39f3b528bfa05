"""`diloco diff OLD NEW`: the settings in which two runs differ, and their curves side by side.

    inner.lr                5e-06 → 0.0001
    inner.rewards.function  rewards.py:score (contents 3f2a09c1) → rewards.py:score (contents 9c1d77e0)
    outer step              0      1      2      3
    OLD                reward  0.114  0.202  0.306  0.495
    NEW                reward                0.306  0.611      a fork of OLD is shown at OLD's steps

Not promised: that the settings cause the difference of the curves; one seed of each run proves little.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diloco.run.record import RunRecord
from diloco.run.script import FILES
from diloco.runlog.reader import Report
from diloco.runlog.summary import curve_of
from inner.settings.task import EVAL, FILE_SETTINGS, is_code, setting_of
from rendezvous.records.digests import hex_of

COLUMNS = 8
SideBySide = Mapping[int, tuple[float | None, float | None]]  # OLD's outer step -> both values


@dataclass(frozen=True)
class Comparison:
    """A comparison.   changes: (name, in OLD, in NEW).   curves: "reward", "loss" or "held out" -> values by step."""

    changes: list[tuple[str, Any, Any]]
    curves: dict[str, SideBySide]

    def lines(self, old: str, new: str) -> list[str]:
        width = max((len(name) for name, _, _ in self.changes), default=0)
        changes = [f"{name:{width}}  {_words(there)} → {_words(here)}" for name, there, here in self.changes]
        found = changes or ["the configs and files are the same"]
        for name, values in self.curves.items():
            found += ["", *_curve_lines(name, values, (old, new))]
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "changes": [{"setting": name, "old": there, "new": here} for name, there, here in self.changes],
            "curves": {name: [[step, *pair] for step, pair in values.items()] for name, values in self.curves.items()},
        }


def compare_runs(records: tuple[RunRecord, RunRecord], reports: tuple[Report, Report]) -> Comparison:
    """Compare two runs; OLD is first in each pair."""
    old, new = records
    shift = new.parent.step if new.parent.run == old.nonce else 0
    first, second = (curve_of(report) for report in reports)
    curves = {}
    if first.name == second.name:
        curves[first.name] = _side_by_side(dict(enumerate(first.mean)), dict(enumerate(second.mean)), shift)
    held_out = [{e.step: e.headline[1].mean for e in report.evaluations} for report in reports]
    if all(held_out):
        curves["held out"] = _side_by_side(held_out[0], held_out[1], shift)
    return Comparison(list_changes(old, new), curves)


def list_changes(old: RunRecord, new: RunRecord) -> list[tuple[str, Any, Any]]:
    """List (setting, old, new) of different values; user files are compared by bytes and function, not by name."""
    there, here = _flat(old.config), _flat(new.config)
    for kind in {*old.files, *new.files}:
        files = [_UserFile.read(record, kind, flat) for record, flat in ((old, there), (new, here))]
        there[_name(kind)], here[_name(kind)] = files if files[0] != files[1] else (None, None)
    names = sorted(name for name in {*there, *here} if there.get(name) != here.get(name))
    return [(name, _plain(there.get(name)), _plain(here.get(name))) for name in names]


def _name(kind: str) -> str:
    """Return the setting that names a user's file; for a script's file, its path."""
    if kind.startswith(FILES):
        return kind
    return setting_of(kind) if kind in FILE_SETTINGS or kind == EVAL else f"{setting_of(kind)} ({kind})"


@dataclass(frozen=True)
class _UserFile:
    """A user's file.   spelled: the file's name in the setting, which does not count as a difference."""

    digest: str
    function: str
    spelled: str = field(compare=False)

    @classmethod
    def read(cls, record: RunRecord, kind: str, settings: Mapping[str, Any]) -> "_UserFile | None":
        stored = record.files.get(kind)
        if stored is None:
            return None
        name = stored["key"].rpartition("/")[2]
        setting = settings.get(_name(kind))
        function = setting.rpartition(":")[2] if is_code(kind) and isinstance(setting, str) else ""
        return cls(hex_of(stored["digest"])[:8], function, f"{name}:{function}" if function else name)

    def __str__(self) -> str:
        return f"{self.spelled} (contents {self.digest})"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, _UserFile) else value


def _words(value: Any) -> str:
    return "not set" if value is None else str(value)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        elif prefix or key not in ("name", "overrides"):
            found[prefix + key] = value
    return {name: value for name, value in found.items() if not name.startswith(("overrides.", "log."))}


def _side_by_side(old: Mapping[int, float | None], new: Mapping[int, float | None], shift: int) -> SideBySide:
    moved = {step + shift: value for step, value in new.items()}
    return {step: (old.get(step), moved.get(step)) for step in sorted({*old, *moved})}


def _curve_lines(
    name: str, values: Mapping[int, tuple[float | None, float | None]], urls: tuple[str, str]
) -> list[str]:
    """Write a curve of both runs at up to COLUMNS steps, with the first and the last."""
    steps = list(values)
    last = max(len(steps) - 1, 1)
    shown = sorted({steps[round(i * last / (COLUMNS - 1))] for i in range(COLUMNS)} if len(steps) > COLUMNS else steps)
    width = max(len(f"{name} by outer step"), *(len(url) for url in urls))
    rows = [f"{f'{name} by outer step':{width}}" + "".join(f"{step:>8}" for step in shown)]
    for side, url in enumerate(urls):
        cells = ("" if (value := values[step][side]) is None else f"{value:.3f}" for step in shown)
        rows.append(f"{url:{width}}" + "".join(f"{cell:>8}" for cell in cells))
    return rows

"""Filter pairs with data-juicer: remove texts that are too short, too long or garbage, and duplicates.

    pairs ─┬ prose ─▶ recipe "default" ─┐     chosen, rejected, pair as strings ─▶ one operator at a time ─▶ fewer rows
           └ calls ─▶ recipe "calls" ───┴─▶   the messages stay in this process ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌▶ joined again by row

    recipe    operators
    auto      by the pair's kind: "calls" if either side is a tool call or a command, else prose ("default")
    default   8 – 32000 characters · 2 – 4096 words · at most half special characters, of both texts; `chosen` unique,
              ignoring case
    calls     2 – 32000 characters · at most 0.8 special characters, of both; the whole pair unique
    a path    your own data-juicer recipe for all pairs: a YAML file with a `process` list

One tool call may be right in many states. The rules for prose would keep one of these pairs, as they make `chosen`
unique. If fewer than one pair in ten is kept, a PairsWarning gives the removals per operator, and what to do.

Each pair keeps both forms: the strings, and message lists for a chat template.

Not promised: quality. A well-formed wrong answer passes the filters.
"""

import asyncio
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from inner.replay.actions import Message, action_message
from inner.replay.commands import Key, has_command
from inner.replay.pairs import DPOPair, extract_dpo_pairs
from inner.replay.states import TraceState
from inner.settings.inner import InnerError

if TYPE_CHECKING:
    from inner.replay.ask import Replay
    from inner.replay.teachers import Teacher

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
RECIPES = {"default": HERE / "recipe.yaml", "calls": HERE / "recipe_calls.yaml"}
TEXTS = ("chosen", "rejected", "pair")
INSTALL = "pip install 'serverless-diloco[replaysim]'"

FEW = 0.1  # if a recipe keeps a smaller share than this, it is probably wrong

Process = list[dict[str, Any]]
Kind = Literal["prose", "calls"]
Passes = list[tuple[str, Process]]


class PairsWarning(UserWarning):
    """Few pairs were kept. The message says how many pairs each operator removed."""


class NormalizedDPOPair(TypedDict):
    state_id: str
    state_messages: list[Message]
    chosen: str
    rejected: str
    chosen_messages: list[Message]
    rejected_messages: list[Message]
    n_teachers_agreeing: int
    weight: NotRequired[float]
    tools: NotRequired[list[dict[str, Any]]]


class DJNormalizer:
    """A filter for pairs.   recipe: "auto", "default", "calls" or a YAML file.   python: a Python with data-juicer."""

    def __init__(self, recipe: str | Path = "auto", *, python: str | Path | None = None) -> None:
        self.recipe = str(recipe)
        names: dict[Kind, str | Path] = {"prose": recipe, "calls": recipe}
        if recipe == "auto":
            names = {"prose": "default", "calls": "calls"}
        self.passes: dict[Kind, Passes] = {kind: passes_of(load_recipe(r), str(r)) for kind, r in names.items()}
        named = str(python or sys.executable)
        self.python = os.path.abspath(named) if os.sep in named else named  # data-juicer runs in another folder
        self.counts: Counter[str] = Counter()  # numbers of the last `normalize`: kept, dropped
        self.dropped: Counter[str] = Counter()  # dropped in the last `normalize`, per operator and text
        self.left_out: dict[str, list[str]] = {}  # the state_ids of these dropped pairs

    def check(self) -> None:
        """Raise InnerError if data-juicer is missing, before any money is spent."""
        if self.python == sys.executable and importlib.util.find_spec("data_juicer") is None:
            raise InnerError(f"DJNormalizer needs data-juicer, which is not installed here: {INSTALL}")

    def normalize(self, pairs: Sequence[DPOPair]) -> list[NormalizedDPOPair]:
        """Return the pairs that pass the filters, in their order."""
        self.check()
        self.dropped.clear()
        self.left_out = {}
        rows = self._sift_pairs(pairs) if pairs else []
        self.counts = Counter(kept=len(rows), dropped=len(pairs) - len(rows))
        log.info("data-juicer kept %d of %d pairs (%s)", len(rows), len(pairs), self._describe_dropped())
        if len(rows) < FEW * len(pairs):
            warnings.warn(self._explain_few(pairs, len(rows)), PairsWarning, stacklevel=2)
        return [normalized_pair(pairs[row["i"]], row["chosen"], row["rejected"]) for row in rows]

    def _sift_pairs(self, pairs: Sequence[DPOPair]) -> list[dict[str, Any]]:
        """Return the rows that pass. With one recipe for both kinds of pairs, find duplicates across kinds, too."""
        kinds: list[Kind] = [pair_kind(pair) if self.recipe == "auto" else "prose" for pair in pairs]
        named: list[Kind] = [kind for kind in self.passes if kind in kinds]
        parts = [
            {
                "passes": self.passes[kind],
                "rows": [_pair_row(i, pair) for i, pair in enumerate(pairs) if kinds[i] == kind],
            }
            for kind in named
        ]
        left = self._run_data_juicer(parts)
        for label, numbers in (item for part in left for item in part["dropped"].items()):
            self.dropped[label] += len(numbers)
            self.left_out.setdefault(label, []).extend(pairs[i]["state_id"] for i in numbers)
        return sorted((row for part in left for row in part["rows"]), key=lambda row: row["i"])

    def _describe_dropped(self) -> str:
        return ", ".join(f"{name} dropped {n}" for name, n in self.dropped.most_common() if n) or "nothing dropped"

    def _explain_few(self, pairs: Sequence[DPOPair], kept: int) -> str:
        calls = sum(pair_kind(pair) == "calls" for pair in pairs)
        advice = "Read some of the pairs; to loosen an operator, copy a recipe.yaml of inner/replay and give its path."
        if self.recipe == "default" and 2 * calls > len(pairs):
            advice = f"{calls} of them are tool calls or commands, and this recipe is for prose: use recipe='auto'."
        return f"data-juicer kept {kept} of {len(pairs)} pairs: {self._describe_dropped()}.\n  next: {advice}"

    def _run_data_juicer(self, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            job = Path(folder, "job.json")
            kept = Path(folder, "kept.json")
            job.write_text(json.dumps(parts), encoding="utf-8")
            script = Path(folder, "run_data_juicer.py")  # copied: keeps our folder off that Python's path
            script.write_bytes((HERE / "run_data_juicer.py").read_bytes())
            command = [self.python, str(script), str(job), str(kept)]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode != 0 or not kept.exists():
                raise InnerError(_explain_failure(self.python, done.stderr))
            return json.loads(kept.read_text(encoding="utf-8"))


def pair_kind(pair: DPOPair) -> Kind:
    """Return "calls" if either side is a tool call, or a command in the trace's form; else "prose"."""
    form = pair.get("action_form")
    return "calls" if has_command(pair["chosen"], form) or has_command(pair["rejected"], form) else "prose"


async def replay_and_normalize_trace(
    states: Sequence[TraceState],
    teachers: "Sequence[Teacher]",
    max_total_usd: float,
    *,
    agreement_threshold: float = 2,
    key: str | Key | None = None,
    normalizer: DJNormalizer | None = None,
    **replay: Any,
) -> "tuple[Replay, list[NormalizedDPOPair]]":
    """Run replay_trace, extract_dpo_pairs and DJNormalizer.   replay: further arguments of replay_trace."""
    from inner.replay.ask import replay_trace

    normalizer = normalizer or DJNormalizer()
    normalizer.check()
    agreeing: Any = {"agreement_threshold": agreement_threshold, "key": key}
    actions = await replay_trace(states, teachers, max_total_usd, **agreeing, **replay)
    pairs = extract_dpo_pairs(states, actions, **agreeing)
    return actions, await asyncio.to_thread(normalizer.normalize, pairs)


def replay_and_normalize_trace_sync(*args: Any, **kwargs: Any) -> "tuple[Replay, list[NormalizedDPOPair]]":
    """Run `replay_and_normalize_trace` for callers without an event loop."""
    return asyncio.run(replay_and_normalize_trace(*args, **kwargs))


def normalized_pair(pair: DPOPair, chosen: str | None = None, rejected: str | None = None) -> NormalizedDPOPair:
    """Return both forms of one pair. A recipe may have rewritten the strings; the messages are made from them."""
    chosen = pair["chosen"] if chosen is None else chosen
    rejected = pair["rejected"] if rejected is None else rejected
    return {
        **pair,
        "chosen": chosen,
        "rejected": rejected,
        "chosen_messages": [action_message(chosen)],
        "rejected_messages": [action_message(rejected)],
    }


def load_recipe(recipe: str | Path) -> Process:
    import yaml

    path = RECIPES.get(str(recipe), Path(recipe))
    if not path.is_file():
        raise InnerError(f"recipe = {str(recipe)!r}: no such file. Built in: auto, {', '.join(RECIPES)}.")
    try:
        process = yaml.safe_load(path.read_text(encoding="utf-8"))["process"]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise InnerError(
            f"recipe {path} has no `process` list of data-juicer operators ({error!r}). Write `process:`, and below it "
            "one `- operator: {arguments}` per line."
        ) from error
    good = isinstance(process, list) and process and all(isinstance(op, dict) and len(op) == 1 for op in process)
    if not good:
        raise InnerError(f"recipe {path}: `process` is {process!r:.80}. Put one `- operator: {{arguments}}` per line.")
    return process


def passes_of(process: Process, recipe: str = "recipe") -> list[tuple[str, Process]]:
    """Group operators by text. Without a text_key an operator runs on both texts, a deduplicator on `chosen` only."""
    passes: dict[str, Process] = {}
    for op in process:
        ((name, given),) = op.items()
        keys = ("chosen",) if name.endswith("_deduplicator") else ("chosen", "rejected")
        for key in [(given or {})["text_key"]] if "text_key" in (given or {}) else keys:
            if key not in TEXTS:
                raise InnerError(f"{recipe}: {name} has text_key {key!r}. Use one of: {', '.join(TEXTS)}.")
            passes.setdefault(key, []).append(op)
    return [(key, passes[key]) for key in TEXTS if key in passes]


def _pair_row(i: int, pair: DPOPair) -> dict[str, Any]:
    whole = [pair["state_messages"], pair["chosen"], pair["rejected"]]
    return {
        "i": i,
        "chosen": pair["chosen"],
        "rejected": pair["rejected"],
        "pair": json.dumps(whole, sort_keys=True, ensure_ascii=False),
    }


def _explain_failure(python: str, stderr: str) -> str:
    last = [line for line in stderr.strip().splitlines() if line.strip()][-3:]
    if "No module named 'data_juicer'" in stderr or "No module named 'aiohttp'" in stderr:
        return f"{python} has no data-juicer: {INSTALL}\n  {last[-1]}"
    return (
        f"data-juicer failed on the pairs.\n  {' | '.join(last)}\n  next: check the recipe's operators and arguments."
    )

"""Pairs through data-juicer: too short, too long, garbage and duplicates go.

    pairs ─▶ chosen, rejected, pair as strings ─▶ pass 1: chosen ─▶ pass 2: rejected ─▶ the same pairs, fewer
                        the messages stay here ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌▶ joined again by row

    recipe    passes
    default   8 – 32000 characters · 2 – 4096 words · at most half special characters, of both texts; `chosen` unique
    calls     for tool calls: 2 – 32000 characters · at most 0.8 special characters, of both; the whole pair unique
    a path    a data-juicer recipe of yours: a YAML file with a `process` list

Each pair keeps both shapes: the strings, and the message lists a chat template takes.

Not promised: quality. A well-formed wrong answer passes.
"""

import asyncio
import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from inner.base import InnerError
from inner.replay.actions import Message, action_message
from inner.replay.commands import Key
from inner.replay.pairs import DPOPair, extract_dpo_pairs
from inner.replay.states import TraceState

if TYPE_CHECKING:
    from inner.replay.ask import Replay
    from inner.replay.teachers import Teacher

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
RECIPES = {"default": HERE / "recipe.yaml", "calls": HERE / "recipe_calls.yaml"}
TEXTS = ("chosen", "rejected", "pair")
INSTALL = "pip install 'serverless-diloco[replaysim]'"

Process = list[dict[str, Any]]


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
    """recipe: "default", "calls" or a YAML file. python: an interpreter that has data-juicer, if this one has not."""

    def __init__(self, recipe: str | Path = "default", *, python: str | Path | None = None) -> None:
        self.passes = passes_of(load_recipe(recipe), str(recipe))
        self.python = str(python or sys.executable)
        self.counts: Counter[str] = Counter()  # of the last call

    def check(self) -> None:
        """InnerError if data-juicer is not there. Before any money is spent."""
        if self.python == sys.executable and importlib.util.find_spec("data_juicer") is None:
            raise InnerError(f"DJNormalizer needs data-juicer, which is not installed here: {INSTALL}")

    def normalize(self, pairs: Sequence[DPOPair]) -> list[NormalizedDPOPair]:
        """The pairs that pass, in their order."""
        self.check()
        rows = [_row(i, pair) for i, pair in enumerate(pairs)]
        kept = self._run(rows) if rows else []
        self.counts = Counter(kept=len(kept), dropped=len(rows) - len(kept))
        log.info("data-juicer kept %d of %d pairs", len(kept), len(rows))
        return [normalized(pairs[row["i"]], row["chosen"], row["rejected"]) for row in kept]

    def _run(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            job, kept = Path(folder, "job.json"), Path(folder, "kept.json")
            job.write_text(json.dumps({"passes": self.passes, "rows": rows}), encoding="utf-8")
            script = Path(folder, "juice.py")  # a copy: our folder must not be on that Python's path
            script.write_bytes((HERE / "juice.py").read_bytes())
            command = [self.python, str(script), str(job), str(kept)]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL)
            if done.returncode != 0 or not kept.exists():
                raise InnerError(_failure(self.python, done.stderr))
            return sorted(json.loads(kept.read_text(encoding="utf-8")), key=lambda row: row["i"])


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
    """replay_trace, extract_dpo_pairs and DJNormalizer in one. `replay`: ledger=, concurrency= … of replay_trace."""
    from inner.replay.ask import replay_trace

    normalizer = normalizer or DJNormalizer()
    normalizer.check()
    agreeing: Any = {"agreement_threshold": agreement_threshold, "key": key}
    actions = await replay_trace(states, teachers, max_total_usd, **agreeing, **replay)
    pairs = extract_dpo_pairs(states, actions, **agreeing)
    return actions, await asyncio.to_thread(normalizer.normalize, pairs)


def replay_and_normalize_trace_sync(*args: Any, **kwargs: Any) -> "tuple[Replay, list[NormalizedDPOPair]]":
    """The same for callers without an event loop."""
    return asyncio.run(replay_and_normalize_trace(*args, **kwargs))


def normalized(pair: DPOPair, chosen: str | None = None, rejected: str | None = None) -> NormalizedDPOPair:
    """Both shapes of one pair. A recipe's mapper may have rewritten the strings; the messages follow them."""
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
        raise InnerError(f"recipe = {str(recipe)!r}: no such file. Built in: {', '.join(RECIPES)}.")
    try:
        process = yaml.safe_load(path.read_text(encoding="utf-8"))["process"]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        raise InnerError(f"recipe {path} has no `process` list of data-juicer operators ({error!r}).") from error
    good = isinstance(process, list) and process and all(isinstance(op, dict) and len(op) == 1 for op in process)
    if not good:
        raise InnerError(f"recipe {path}: `process` is {process!r:.80}. One `- operator: {{arguments}}` per line.")
    return process


def passes_of(process: Process, recipe: str = "recipe") -> list[tuple[str, Process]]:
    """One pass per text. An operator without a text_key runs on both texts; a deduplicator on `chosen` alone."""
    passes: dict[str, Process] = {}
    for op in process:
        ((name, given),) = op.items()
        keys = ("chosen",) if name.endswith("_deduplicator") else ("chosen", "rejected")
        for key in [(given or {})["text_key"]] if "text_key" in (given or {}) else keys:
            if key not in TEXTS:
                raise InnerError(f"{recipe}: {name} has text_key {key!r}; a pair has the texts {', '.join(TEXTS)}.")
            passes.setdefault(key, []).append(op)
    return [(key, passes[key]) for key in TEXTS if key in passes]


def _row(i: int, pair: DPOPair) -> dict[str, Any]:
    whole = [pair["state_messages"], pair["chosen"], pair["rejected"]]
    return {
        "i": i,
        "chosen": pair["chosen"],
        "rejected": pair["rejected"],
        "pair": json.dumps(whole, sort_keys=True, ensure_ascii=False),
    }


def _failure(python: str, stderr: str) -> str:
    last = [line for line in stderr.strip().splitlines() if line.strip()][-3:]
    if "No module named 'data_juicer'" in stderr or "No module named 'aiohttp'" in stderr:
        return f"{python} has no data-juicer: {INSTALL}\n  {last[-1]}"
    return (
        f"data-juicer failed on the pairs.\n  {' | '.join(last)}\n  next: check the recipe's operators and arguments."
    )

"""Does a model learn from Feature Deletion's hidden tests? Held-out tasks before and after GRPO, a tiny model.

    python examples/studies/deletion.py --to studies          one core; needs bubblewrap (docs/studies/deletion.md)

    repositories   of two functions, from a generator below; one loses its body:
                       def rate(a, b): "The chobra of a and b." raise NotImplementedError(…)
    tasks          inner.extras.deletion.generate makes and checks them: `return a + 2 * b` is hidden, tests tell values
    the model      reads the file with a tool, edits it with another; real sandbox, real verdict
    warm start     supervised on solutions of other repositories: ordinary words ("sum") have one meaning, and each
                   repository's own jargon another, so that no word of jargon can be known
    GRPO           on repositories of one house: four words of jargon that the warm start has never seen
    held out       repositories of the same house, whose names and modules were in no task of GRPO

Not promised: anything about writing code. 0.4 M parameters learn here what four words mean, from rewards alone.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trials import Curve, Row, Trial, paired, run_missing

from inner import InnerConfig, InnerLoop, Seeds, ToolWorld, build_inner
from inner.extras.deletion.generate import make_tasks
from inner.extras.deletion.taking_out import GONE
from inner.settings.task import DataSettings, SamplingSettings

MEANINGS = (
    "{p} + {q}", "{p} - {q}", "{q} - {p}", "{p} * {q}",
    "max({p}, {q})", "min({p}, {q})", "{p} + 2 * {q}", "{p} * {p} - {q}",
)  # fmt: skip
ORDINARY = {"sum": 0, "difference": 1, "product": 3, "maximum": 4}
SYLLABLES = ("bra", "cho", "dri", "flu", "gne", "kro", "lum", "pli", "sna", "twe")
JARGON = [first + second for first, second in product(SYLLABLES, SYLLABLES) if first != second]
HOUSE, ELSEWHERE = JARGON[::23], [word for n, word in enumerate(JARGON) if n % 23]  # 4 and 86 words
NAMES = ("rate", "cost", "span", "gain", "load", "tally", "price", "score", "depth", "width", "total", "bonus")
MODULES = ("shop", "farm", "bank", "port", "mill", "yard", "dock", "lab")
LETTERS = tuple("abcdmnuvxy")
TRAINED, HELD_OUT = (NAMES[:6], MODULES[:4]), (NAMES[6:], MODULES[4:])
TASKS, HELD = 24, 32  # numbers of tasks; all four words are equally frequent
WARM_STEPS, STEPS, BATCH, GROUP, LR, EVERY = 900, 80, 64, 16, 1e-3, 20
SPECIAL = [
    "<pad>",
    "<unk>",
    "<end>",
    "<user>",
    "<assistant>",
    "<tool>",
    "<call>",
    "</call>",
    "<path>",
    "<old>",
    "<new>",
]
TEMPLATE = (
    "{%- for m in messages -%}<{{ m.role }}>"
    "{%- if m.role == 'assistant' -%}{% generation %}{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}"
    "<call>{{ c.function.name }}{%- for k, v in c.function.arguments.items() -%}<{{ k }}>{{ v }}{%- endfor -%}</call>"
    "{%- endfor -%}{%- endif -%}{{ m.content }}<end>{% endgeneration %}{%- else -%}{{ m.content }}<end>{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}<assistant>{%- endif -%}"
)
CALL = {
    "open_pattern": r"\s*<call>(?P<name>\w+)", "close_pattern": r"</call>", "repeats": True, "content": "xml-inline",
    "content_args": {"tag_pattern": r"<(?P<key>path|old|new)>(?P<value>[^<]*)"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}  # fmt: skip
RESPONSE = {
    "defaults": {"role": "assistant"}, "start_anchor": "<assistant>",
    "fields": {"tool_calls": CALL, "content": {"close_pattern": r"<end>\s*", "content": "text"}},
}  # fmt: skip


# -------------------------------------------------------------------- repositories


@dataclass(frozen=True)
class TinyRepository:
    """A module of two functions; `name`: the function that a task takes out."""

    module: str
    name: str
    word: str
    meaning: int
    p: str
    q: str

    @property
    def path(self) -> str:
        return f"{self.module}.py"

    @property
    def body(self) -> str:
        return f"return {MEANINGS[self.meaning].format(p=self.p, q=self.q)}"

    @property
    def asked(self) -> str:
        return f"`{self.name}` ({self.path})"

    def text(self, body: str) -> str:
        kept = f"def keep({self.p}):\n    return {self.p} + 1\n\n\n"
        doc = f'    """The {self.word} of {self.p} and {self.q}."""\n'
        return f"{kept}def {self.name}({self.p}, {self.q}):\n{doc}    {body}\n"

    def write(self, folder: Path) -> Path:
        repo = folder / f"{self.module}-{self.name}-{self.word}-{self.p}{self.q}"
        repo.mkdir()
        (repo / self.path).write_text(self.text(self.body))
        calls = ", ".join(f"{self.module}.{self.name}({a}, {b})" for a, b in PAIRS)
        told = [eval(self.body.removeprefix("return "), {self.p: a, self.q: b}) for a, b in PAIRS]
        lines = [f'[[feature]]\nname = "{self.name}"\nfunctions = ["{self.path}:{self.name}"]\n']
        for name, asked, expect in (("values", calls, told), ("keeps", f"{self.module}.keep(40), 7", [41, 7])):
            lines.append(f"[[test]]\nname = '{name}'\nexpect = '{json.dumps(expect)}'")
            lines.append(f"run = '''import {self.module}\nresult = [{asked}]'''\n")
        (repo / "feature.toml").write_text("\n".join(lines))
        return repo


PAIRS = ((7, 3), (2, 9), (5, 5))


def draw(rng: random.Random, names: Sequence[str], modules: Sequence[str], word: str, meaning: int) -> TinyRepository:
    p, q = rng.sample(LETTERS, 2)
    return TinyRepository(rng.choice(modules), rng.choice(names), word, meaning, p, q)


def house_rows(seed: int, count: int, pools: tuple[Sequence[str], Sequence[str]]) -> list[dict[str, Any]]:
    """Make tasks of a house, equally many of each word; the meaning of a word depends on the seed."""
    meanings = random.Random(seed).sample(range(len(MEANINGS)), len(HOUSE))
    rng, made = random.Random(f"{seed} {pools}"), dict[str, Any]()
    with TemporaryDirectory() as folder:
        while len(made) < count:
            n = len(made) % len(HOUSE)
            found = draw(rng, *pools, HOUSE[n], meanings[n])
            if str(found) not in made:
                task = make_tasks(found.write(Path(folder)))[0]
                made[str(found)] = {"prompt": [{"role": "user", "content": found.asked}], "task": task.dump()}
    return list(made.values())


# -------------------------------------------------------------------- the model and its warm start


class Solutions(ToolWorld):
    """The warm start's dialogues: solutions of other repositories, each with its own meaning of the jargon."""

    def dialogue(self, rng: random.Random) -> list[dict[str, Any]]:
        known = rng.random() < 0.5
        word = rng.choice(list(ORDINARY) if known else ELSEWHERE)
        meaning = ORDINARY[word] if known else rng.randrange(len(MEANINGS))
        return solution(draw(rng, NAMES, MODULES, word, meaning))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        words = sorted({token for text in texts() for token in re.findall(PIECES, text)})
        words = SPECIAL + [word for word in words if word not in SPECIAL]
        core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
        core.decoder = decoders.Fuse()
        core.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", eos_token="<end>", padding_side="left",
            model_max_length=512, clean_up_tokenization_spaces=False,
        )  # fmt: skip
        tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
        return tokenizer


PIECES = r" ?\w+|\s+|[^\w\s]"


def solution(repo: TinyRepository) -> list[dict[str, Any]]:
    """The turns of an agent that reads the file and writes the body again."""
    whole, gone = repo.text(repo.body), repo.text(GONE)
    return [
        {"role": "user", "content": repo.asked},
        called("read_file", path=repo.path), {"role": "tool", "content": gone},
        called("edit_file", path=repo.path, old=GONE, new=repo.body),
        {"role": "tool", "content": f"{repo.path}: {len(whole)} characters"},
        {"role": "assistant", "content": "done"},
    ]  # fmt: skip


def called(name: str, **arguments: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def texts() -> list[str]:
    """Every word that a repository or a turn may have."""
    found = [TinyRepository("shop", "rate", "sum", n, "a", "b") for n in range(len(MEANINGS))]
    said = [text for repo in found for turn in solution(repo) for text in [turn["content"], repo.body]]
    several = [*JARGON, *ORDINARY, *NAMES, *MODULES, *LETTERS, *map(str, range(300))]
    return [*said, "done", "read_file", "edit_file", *several, *(f" {word}" for word in several)]


def write_start(folder: Path) -> None:
    """Make the warm-started model once: it knows no house, so all seeds begin with it."""
    if folder.exists():
        return
    world = Solutions()
    tokenizer: Any = world.tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    print(f"warm start: {world.warm_start(model, tokenizer, WARM_STEPS):.3f} nats", flush=True)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# -------------------------------------------------------------------- a trial


def run(folder: Path, steps: int, trial: Trial) -> tuple[Curve, Row]:
    torch.set_num_threads(1)
    own = folder / f"seed-{trial.seed}"
    own.mkdir(exist_ok=True)
    for kind, pools, count in (("trained", TRAINED, TASKS), ("held", HELD_OUT, HELD)):
        if not (own / f"{kind}.jsonl").exists():
            rows = house_rows(trial.seed, count, pools)
            (own / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loop = open_loop(own, trial.seed)
    held, trained = ([json.loads(line) for line in (own / f"{kind}.jsonl").open()] for kind in ("held", "trained"))
    before = {"trained_before": value(loop, trained)}
    curve = [(0, value(loop, held))]
    taken = 0

    def stop() -> bool:
        nonlocal taken
        taken += 1
        if taken % EVERY == 0:
            curve.append((taken, value(loop, held)))
        return taken >= steps

    loop.train(stop)
    return curve, {**before, "trained_after": value(loop, trained)}


def open_loop(own: Path, seed: int) -> InnerLoop:
    config = InnerConfig(
        model=str(own.parent / "start"), batch_size=BATCH, lr=LR, data=DataSettings(prompts="prompts.jsonl"),
        sampling=SamplingSettings(
            environment="deletion_world.py:World", num_generations=GROUP, max_completion_length=256,
            max_tool_calling_iterations=2,
        ),
    )  # fmt: skip
    files = {"prompts": own / "trained.jsonl", "environment": Path(__file__).with_name("deletion_world.py")}
    return build_inner(config, own.parent / "start", files, Seeds(data=1000 * seed, noise=1000 * seed))


def value(loop: InnerLoop, rows: list[dict[str, Any]]) -> float:
    """Return the share of sampled rollouts whose hidden tests pass, two of each task."""
    return fmean(fmean(loop.score(rows, greedy=False, seed=seed)["reward"]) for seed in (98, 99))  # type: ignore[attr-defined]


def table(rows: list[Row]) -> str:
    lines = ["| | before | after | after − before (95 %) |", "|---|---|---|---|"]
    held = [row["curve"][0][1] for row in rows], [row["curve"][-1][1] for row in rows]
    trained = [row["trained_before"] for row in rows], [row["trained_after"] for row in rows]
    for name, (before, after) in {"held-out tasks": held, "trained tasks": trained}.items():
        cells = " | ".join(f"{fmean(v):.3f} ± {stdev(v) / len(v) ** 0.5:.3f}" for v in (before, after))
        difference = paired(after, before)
        lines.append(f"| {name} | {cells} | {difference}, one-sided bound {difference.lower:+.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args()
    write_start(given.to / "start")
    trials = [Trial("grpo", seed) for seed in given.seeds]
    rows = run_missing(trials, partial(run, given.to, given.steps), given.to / "deletion.jsonl", given.workers)
    print(table(rows))


if __name__ == "__main__":
    main()

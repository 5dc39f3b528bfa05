"""The reward on prompts that training never saw, with standard errors.

python examples/real/evaluate.py BASE [ADAPTER]      folders that `diloco export` wrote; -> a line of JSON

sampled   at the training temperature, 1.0, SAMPLES per prompt       greedy   the likeliest token each time
the standard error is that of the mean over prompts: answers to one prompt are alike
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parent))
from rewards import score

HELD_OUT = Path(__file__).with_name("held_out.jsonl")
SAMPLES, BATCH, NEW_TOKENS, TEMPERATURE = 2, 75, 10, 1.0


def load(base: str, adapter: str | None) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    return model.eval()


@torch.no_grad()
def answers(model: Any, tokenizer: Any, prompts: list[Any], sample: bool) -> list[str]:
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    how = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    ids = model.generate(**encoded, max_new_tokens=NEW_TOKENS, pad_token_id=tokenizer.pad_token_id, **how)
    return tokenizer.batch_decode(ids[:, encoded.input_ids.shape[1] :], skip_special_tokens=True)


def measure(model: Any, tokenizer: Any, rows: list[dict[str, Any]], sample: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    texts = list[list[str]]()
    for _ in range(SAMPLES if sample else 1):
        at_once = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        texts.append([t for some in at_once for t in answers(model, tokenizer, [r["prompt"] for r in some], sample)])
    rewards = torch.tensor([[score(t, r["answer"]) for t, r in zip(ts, rows, strict=True)] for ts in texts])
    by_prompt = rewards.mean(0)
    alone = torch.tensor([[float(t.strip() == r["answer"]) for t, r in zip(ts, rows, strict=True)] for ts in texts])
    shares = {"right": (rewards > 0).float().mean(), "alone": alone.mean()}
    found = {"reward": by_prompt.mean(), "se": by_prompt.std() / len(rows) ** 0.5, **shares}
    return {name: round(value.item(), 4) for name, value in found.items()} | {
        "prompts": len(rows),
        "texts": texts[0][:4],
    }


def main(base: str, adapter: str | None = None) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    model = load(base, adapter)
    print(json.dumps({kind: measure(model, tokenizer, rows, kind == "sampled") for kind in ("sampled", "greedy")}))


if __name__ == "__main__":
    main(*sys.argv[1:])

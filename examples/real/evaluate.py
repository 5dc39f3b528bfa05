"""The reward on prompts that training never saw, with standard errors.

python examples/real/evaluate.py BASE [ADAPTER]      folders that `diloco export` wrote; -> a line of JSON

sampled   at the training temperature, 1.0, SAMPLES per prompt       greedy   the likeliest token each time
right     the sum is in the reply        stopped   the sum ends the reply, and the model itself stopped
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
SAMPLES, BATCH, NEW_TOKENS, TEMPERATURE = 2, 75, 16, 1.0


def load(base: str, adapter: str | None) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    return model.eval()


@torch.no_grad()
def answers(model: Any, tokenizer: Any, prompts: list[Any], sample: bool) -> list[tuple[str, bool]]:
    """Return (the reply, whether the model ended it) for each prompt."""
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    how = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0} if sample else {"do_sample": False}
    ids = model.generate(**encoded, max_new_tokens=NEW_TOKENS, pad_token_id=tokenizer.pad_token_id, **how)
    replies = ids[:, encoded.input_ids.shape[1] :]
    ended = (replies == tokenizer.eos_token_id).any(1).tolist()
    return list(zip(tokenizer.batch_decode(replies, skip_special_tokens=True), ended, strict=True))


def measure(model: Any, tokenizer: Any, rows: list[dict[str, Any]], sample: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    batches = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
    replies = list[tuple[str, bool]]()
    for _ in range(SAMPLES if sample else 1):
        for batch in batches:
            replies += answers(model, tokenizer, [row["prompt"] for row in batch], sample)
    asked = rows * (len(replies) // len(rows))
    rewards = torch.tensor([score(text, row["answer"]) for (text, _), row in zip(replies, asked, strict=True)])
    ended = torch.tensor([ends for _, ends in replies])
    by_prompt = rewards.view(-1, len(rows)).mean(0)
    found = {
        "reward": by_prompt.mean(),
        "se": by_prompt.std() / len(rows) ** 0.5,
        "right": (rewards > 0).float().mean(),
        "stopped": ((rewards == 1) & ended).float().mean(),
    }
    texts = [text for text, _ in replies[:4]]
    return {name: round(value.item(), 4) for name, value in found.items()} | {"prompts": len(rows), "texts": texts}


def main(base: str, adapter: str | None = None) -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    rows = [json.loads(line) for line in HELD_OUT.read_text().splitlines()]
    model = load(base, adapter)
    print(json.dumps({kind: measure(model, tokenizer, rows, kind == "sampled") for kind in ("sampled", "greedy")}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""PEFT around a model, make_diloco around both: two processes train one LoRA adapter, and send nothing else.

python examples/adapter_loop.py          kill -9 one process and start the same command again: it continues

make_diloco synchronises the parameters that require a gradient, which are the adapter's. Each process keeps its own
base, which must be equal in all of them; joining compares the bases. A may be drawn at random: a joining process takes
the run's A.
"""

import multiprocessing
import sys
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from diloco import StoreManager, make_diloco

H = 5  # inner steps between two syncs


def base_model() -> LlamaForCausalLM:
    """Stands for `AutoModelForCausalLM.from_pretrained(…, revision=…)`."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))


def batch(slot: str, step: int) -> torch.Tensor:
    """Return sequences that count upwards: a function of slot and step, so that none is seen twice."""
    generator = torch.Generator().manual_seed(step * 1000 + int(slot[1:]))
    return (torch.randint(64, (16, 1), generator=generator) + torch.arange(12)) % 64


def train(url: str, slot: str, replicas: int = 2, steps: int = 10) -> float:
    model = get_peft_model(base_model(), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    manager = StoreManager(url, slot, replicas=replicas, steps=steps)
    loss = torch.zeros(())
    with make_diloco(model, optimizer, manager, sync_every=H) as loop:
        step = loop.committed() * H
        while not manager.done:
            ids, step = batch(slot, step), step + 1
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            loop.log(loss=loss, samples=len(ids))
            optimizer.step()
        travels, whole = loop.state.size(0), sum(p.numel() for p in model.parameters())
        print(f"{slot}: loss {loss.item():.3f}, {travels:,} of {whole:,} parameters travelled, θ {loop.state.digest()}")
    if slot == "r00":
        model.save_pretrained(f"{url}-adapter")  # loads with PeftModel.from_pretrained on the same base
    return loss.item()


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "runs/adapter-loop"
    print("the run is", url)
    fleet = [multiprocessing.get_context("spawn").Process(target=train, args=(url, slot)) for slot in ("r00", "r01")]
    for replica in fleet:
        replica.start()
    for replica in fleet:
        replica.join()

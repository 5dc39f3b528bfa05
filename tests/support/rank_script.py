"""A person's script that trains a tiny model with a stock trainer: by itself, under torchrun, under accelerate launch.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.support.rank_script sft FOLDER …
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from diloco import DiLoCoCallback
from diloco.outer.ranks.group import join_ranks, launched_ranks
from diloco.process.ranks import MEET
from diloco.run.script import Script
from rendezvous.clock import SystemClock
from rendezvous.stores.open import open_store
from tests.support.ranks import FAST, let_accelerate_shard
from tests.support.tiny_models import tiny_model_folder


def run_launched(folder: str) -> int:
    """Run FOLDER/train.py as each rank of `diloco launch` does, without a run."""
    from diloco.replica.ranks import follow
    from diloco.replica.script_ranks import VARIABLES, tell_script
    from diloco.script.process import start

    if os.environ["RANK"] != "0":
        return follow()
    os.environ.update(dict.fromkeys(VARIABLES, "of the run"))
    script = Script("train.py", (), False)
    tell_script(script, Path(folder))
    start(script, Path(folder))
    return 0


def train_launched(change: str, folder: str) -> int:
    """Train in shards as a rank of `diloco launch`: rank 0 alone has claimed the slot before the script begins.

    change: "frozen" or "peft"."""
    from peft import LoraConfig, get_peft_model

    from diloco.process.session import Session
    from diloco.run.library import LAUNCHED, ensure_slot
    from tests.diloco import test_script_callback as scripts

    if os.environ["RANK"] == "0":
        store, clock = open_store(f"file://{folder}/run"), SystemClock()
        ensure_slot(store, clock, "r00", replicas=1, min_replicas=1, steps=None)
        LAUNCHED[f"file://{folder}/run"] = Session(store, "r00", clock=clock, timing=FAST)
    load = scripts.AutoModelForCausalLM.from_pretrained

    def load_changed(*args: Any) -> Any:
        model = load(*args)
        if change == "peft":
            return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        model.get_input_embeddings().requires_grad_(False)
        return model

    scripts.AutoModelForCausalLM.from_pretrained = load_changed  # type: ignore[method-assign]
    settings = {"max_steps": 4, "learning_rate": 1e-3, "fsdp": True}
    return train("sft", folder, settings, {"outer_lr": 0.7, "sync_every": 2})


def train(kind: str, folder: str, settings: dict[str, Any], outer: dict[str, Any]) -> int:
    """Train as one rank; rank 0 saves the weights into FOLDER/weights.pt."""
    from tests.diloco.test_script_callback import trainer_of

    torch.set_num_threads(1)
    tiny_model_folder("llama")  # before the ranks meet: then Transformers would let rank 0 alone save it
    if launched_ranks() > 1 and MEET in os.environ:
        join_ranks()
        if settings.get("fsdp"):
            let_accelerate_shard()
    callback = DiLoCoCallback(f"file://{folder}/run", **outer)
    rank = int(os.environ.get("RANK", "0"))
    trainer = trainer_of(kind, Path(folder) / f"rank{rank}", [callback], **settings)
    trainer.train()
    assert all(isinstance(p, DTensor) == bool(settings.get("fsdp")) for p in trainer.model.parameters())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in trainer.model.parameters()]
    (Path(folder) / f"ended{rank}").touch()
    if rank == 0:
        torch.save(torch.cat([p.detach().reshape(-1) for p in whole]), Path(folder) / "weights.pt")
    return 0


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4]))

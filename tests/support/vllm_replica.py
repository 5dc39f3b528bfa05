"""A replica that generates with the real vLLM, on a CPU, and notes what its engine holds: `python -m` this file

    URL SLOT FOLDER      folder/SLOT.PID.jsonl    a line per generation: the committed step, the base's digest, and at
                                                  the first one of each step how far the engine's weights are from θ
                         folder/SLOT.PID.STEP.pt  what that first generation was asked, and answered

What the CPU build needs besides is in `on_cpu`; a GPU's needs none of it.
"""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ENVIRON = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # vLLM's ─▶ Llama's


def on_cpu() -> None:
    """The CPU backend packs linear weights once they are loaded and drops the parameter, so that no second load is
    possible; and without enforce_eager its compiler runs for many minutes."""
    import torch
    import trl.generation.vllm_generation as generation
    import vllm._custom_ops as operations
    import vllm.model_executor.layers.utils as layers

    torch.set_num_threads(1)
    operations._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *args, **kwargs: False
    generation.LLM = functools.partial(generation.LLM, enforce_eager=True)  # type: ignore[attr-defined]


def expected_weights(model: Any, theta: Iterable[tuple[str, Any]], scale: float) -> dict[str, Any]:
    """W + α/r B A by the names of the base's files, with A and B out of θ."""
    adapter = dict(theta)
    found = {}
    for name, p in model.named_parameters():
        if ".lora_" in name:
            continue
        stem = name.removesuffix(".base_layer.weight")
        weight = p.detach()
        if stem != name:
            a, b = (adapter[f"{stem}.lora_{factor}.default.weight"].to(weight) for factor in "AB")
            weight = weight + scale * (b @ a)
        found[name.removeprefix("base_model.model.").replace(".base_layer", "")] = weight
    return found


def far_from(engine: Any, expected: dict[str, Any]) -> dict[str, float]:
    """|engine − θ| / |θ|, the largest of each of the engine's parameters."""
    import torch

    inside = engine.llm.llm_engine.model_executor.driver_worker.model_runner.model
    found = {}
    for name, p in inside.named_parameters():
        fused = next((part for part in FUSED if f".{part}." in name), None)
        names = [name.replace(fused, part) for part in FUSED[fused]] if fused else [name]
        weight = torch.cat([expected[n] for n in names])
        held = p.detach()[: weight.shape[0]].float()  # the vocabulary is padded
        found[name] = ((held - weight).abs() / weight.abs().clamp(min=1e-5)).max().item()
    return found


class Spy:
    """Around Engine.generate; `follow` gives it the run's committed step and θ."""

    def __init__(self, stem: str, scale: float) -> None:
        self.stem, self.scale = stem, scale
        self.step: Callable[[], int] = lambda: -1
        self.theta: Any = None
        self.compared = -1

    def note(self, engine: Any, prompts: Any, generate: Callable[[], Any]) -> Any:
        from diloco.outer.frozen import frozen_digest

        step = self.step()
        row: dict[str, Any] = {"step": step}
        first = step != self.compared
        if first:
            row["far"] = far_from(engine, expected_weights(engine.model, self.theta(), self.scale))
        answer = generate()
        if first:
            import torch

            self.compared = step
            torch.save(
                {"step": step, "prompts": prompts, "ids": answer[1], "logps": answer[2]}, f"{self.stem}.{step}.pt"
            )
        row["base"] = frozen_digest(engine.model)
        with open(f"{self.stem}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        return answer


def watch(stem: str, scale: float) -> None:
    """Every engine of this process is noted."""
    from inner.rollouts.engine import Engine
    from inner.train.grpo import GrpoLoop

    spy = Spy(stem, scale)
    generate, follow = Engine.generate, GrpoLoop.follow

    def noted(self: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        return spy.note(self, prompts, lambda: generate(self, prompts, *args, **kwargs))

    def followed(self: Any, step: Callable[[], int], theta: Any, *rest: Any) -> None:
        spy.step, spy.theta = step, theta
        follow(self, step, theta, *rest)

    Engine.generate = noted  # type: ignore[method-assign]
    GrpoLoop.follow = followed  # type: ignore[method-assign]


def main(url: str, slot: str, folder: str) -> int:
    os.environ.update(ENVIRON)
    on_cpu()
    from diloco.replica import main
    from diloco.run.record import read_run

    lora = read_run(url).config.inner.lora
    assert lora is not None
    watch(str(Path(folder) / f"{slot}.{os.getpid()}"), lora.alpha / lora.r)
    return main([url, "--slot", slot])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

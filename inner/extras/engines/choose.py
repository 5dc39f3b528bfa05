"""Engines that sample for an actor, behind two verbs.

    load(parameters)                   the weights of a newer outer step
    sample(prompt, n, settings)        n completions: ids, and log-probs under the distribution that sampled

    kind         address                          newer weights                               log-probs of
    openai       http://HOST:PORT of a vLLM       adapter files, /v1/load_lora_adapter        the server's weights
    llama_cpp    a .gguf file of the base model   the adapter as .gguf, replaced each time    the file's precision

Without an engine, TRL's own generation samples (transformers, or vLLM in process with [inner.vllm]).  The tool loop,
masks and rewards are TRL's and ours in all cases: an engine replaces one call.

Not promised: weights of a run without [inner.lora]; top-p, top-k, min-p or a repetition penalty; images.  llama.cpp's
own server reads adapters only when it starts, so it cannot follow a run.  MLX.
"""

from pathlib import Path
from typing import Any

from inner.errors import InnerError
from inner.extras.engines.sampling import SamplingEngine, sample_with
from inner.rollouts.recorded import is_truncated


def use_engine(typed: str, trainer: Any, *, name: str, folder: Path) -> SamplingEngine:
    """Let an actor's trainer sample with an engine, and return it.   typed: KIND:ADDRESS.   name: of the actor.

    folder: for adapters.   Raise InnerError for an address or sampling settings with which it cannot work.  The run has
    an adapter, and the kind is known (diloco/run/combinations.py).
    """
    kind, _, address = typed.partition(":")
    if is_truncated(trainer):
        raise InnerError(
            f"the engine {kind} samples from all tokens, and this run sets top_p, top_k, min_p, a repetition penalty "
            "or generation_kwargs. Use no engine, or take them out of the run"
        )
    engine = _make(kind, address, trainer.model.peft_config["default"], name=name, folder=folder)
    sample_with(trainer, engine)
    return engine


def _make(kind: str, address: str, config: Any, *, name: str, folder: Path) -> SamplingEngine:
    if kind == "openai":
        from inner.extras.engines.server import AdapterServer

        return AdapterServer(address, config, name=name, folder=folder)
    from inner.extras.engines.llama import LlamaEngine

    return LlamaEngine(Path(address), config, folder=folder)

"""Chooses the engine that samples for an actor; every engine has the same two methods.

    load(parameters)                   the weights of a newer outer step
    sample(prompt, n, settings)        n completions: ids, and log-probs under the distribution that sampled

    kind         address                          newer weights                               log-probs of
    openai       http://HOST:PORT of a vLLM       adapter files, /v1/load_lora_adapter        the server's weights
    llama_cpp    a .gguf file of the base model   the adapter as .gguf, replaced each time    the file's precision
    mlx          a model's folder or name, or ""  A and B, put on the model's layers          the model's precision

Without an engine, TRL's own generation samples (transformers, or vLLM in process with [inner.vllm]).  With an engine,
the tool loop, masks and rewards stay the same: an engine replaces only one call.

Not promised: weights of a run without [inner.lora]; top-p, top-k, min-p or a repetition penalty; images.  llama.cpp's
own server reads adapters only when it starts, so it cannot follow a run.
"""

from pathlib import Path
from typing import Any

from inner.errors import InnerError
from inner.extras.engines.sampling import SamplingEngine, sample_with
from inner.rollouts.recording.found import is_truncated


def use_engine(typed: str, trainer: Any, *, name: str, folder: Path) -> SamplingEngine:
    """Let an actor's trainer sample with an engine; return the engine.   typed: KIND:ADDRESS.   name: the actor's name.

    folder: gets the adapters' files.   Raise InnerError for an address or sampling settings that the engine cannot use.
    Call this only for a run with an adapter and for a known kind (diloco/run/combinations.py checks both).
    """
    kind, _, address = typed.partition(":")
    if is_truncated(trainer):
        raise InnerError(
            f"the engine {kind} samples from all tokens, and this run sets top_p, top_k, min_p, a repetition penalty "
            "or generation_kwargs. Use no engine, or take them out of the run"
        )
    engine = _make(kind, address, trainer.model, name=name, folder=folder)
    sample_with(trainer, engine)
    return engine


def _make(kind: str, address: str, model: Any, *, name: str, folder: Path) -> SamplingEngine:
    config = model.peft_config["default"]
    if kind == "openai":
        from inner.extras.engines.server import AdapterServer

        return AdapterServer(address, config, name=name, folder=folder)
    if kind == "mlx":
        from inner.extras.engines.mlx import MlxEngine

        return MlxEngine(address or model.get_base_model().name_or_path, config)
    if kind != "llama_cpp":
        raise InnerError(f"the engine {kind!r} has no class here. Add it to `_make`")
    from inner.extras.engines.llama import LlamaEngine

    return LlamaEngine(Path(address), config, folder=folder)

"""Write the start model's folder from a config, and build a loop from such a folder.

    publish_model(config, folder)                        once: the start model, in from_pretrained's format; with
                                                         [inner.lora] also its adapter, in the subfolder `adapter`
    load_start(folder, dtype, lora)                      load those weights, rounded to the run's dtype
    build_inner(config, folder, files, seeds) -> loop    in every session of a replica

    toolworld    built and warm-started in code          tiny    built in code
    *.gguf       dequantised (inner/models/gguf.py)
    others       loaded from the folder or the Hub at `revision`, saved again

Not promised: that a Hub id without `revision` is the same model tomorrow; a run therefore records the commit
(inner/models/hub_model.py).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from inner.models.causal_lm import number_positions
from inner.models.naming import is_gguf_file
from inner.settings.inner import Files, InnerConfig, InnerError, InnerLoop, Seeds
from inner.settings.task import LoraSettings

BUILT_IN = {"toolworld": "inner.worlds.toolworld", "tiny": "inner.worlds.tiny"}  # each defines `start_model(config)`


def build_inner(
    config: InnerConfig, model_dir: Path, files: Files, seeds: Seeds, warmup_steps: int = 0, scratch: Path | None = None
) -> InnerLoop:
    """Build the loop that `config` describes, on the model in `model_dir`. The loop begins at inner step `seeds.start`.

    scratch: a folder for files of TRL and others (default: a temporary one)."""
    if config.vllm is not None:
        from inner.settings.vllm import refuse_without_vllm

        refuse_without_vllm()
    model: Any
    model, tokenizer = _load_model(str(model_dir), config, revision=None, local=True, base=base_of(config.lora))
    if config.lora is not None:
        model = _load_adapter(model, model_dir, config.lora)
    if config.loop == "supervised":
        from inner.train.supervised import open_loop

        return open_loop(config, model, tokenizer, files, seeds, warmup_steps=warmup_steps)
    try:
        from inner.train.grpo import GrpoLoop
        from inner.train.task import load_task

        if "DILOCO_RANKS" in os.environ:  # this is a rank of a replica (diloco/process/ranks.py)
            from inner.train.ranks import RankLoop as GrpoLoop
    except ModuleNotFoundError as missing:
        raise ImportError(f"build_inner needs {missing.name}: pip install 'serverless-diloco[train]'") from missing
    return GrpoLoop(
        config, model, tokenizer, load_task(config, files), seeds, warmup_steps=warmup_steps, scratch=scratch
    )


def _load_adapter(model: Any, model_dir: Path, settings: LoraSettings) -> Any:
    from inner.models.lora import ADAPTER, load_adapter

    return load_adapter(model, model_dir / ADAPTER, settings)


def publish_model(config: InnerConfig, out_dir: Path) -> None:
    """Write the start model to `out_dir`: weights, config, tokenizer, chat template."""
    tokenizer: PreTrainedTokenizerBase
    model: Any
    if config.model in BUILT_IN:
        model, tokenizer = import_module(BUILT_IN[config.model]).start_model(config)
        model = model.to(getattr(torch, config.dtype))
    else:
        model, tokenizer = _load_model(config.model, config, config.revision, local=False)
    if config.loop == "grpo":
        number_positions(model)  # raises InnerError now, before a replica starts
    silence_transformers()
    model.eval().save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)
    if config.lora is not None:
        from inner.models.lora import ADAPTER, new_adapter, save_adapter

        save_adapter(new_adapter(model, config.lora), out_dir / ADAPTER)


def load_start(
    model_dir: Path, dtype: str, lora: "LoraSettings | None" = None, base: str | None = None, source: str = ""
) -> tuple[Any, list[str]]:
    """Load the start model as `build_inner` does; return (model, names of weights in no file, drawn at random).

    lora: if given, also load the adapter in that folder, on its base.   base: "nf4" for 4 bits without an adapter.
    source: if given, the model's name in the error that refuses drawn weights other than the head's."""
    with refuse_unreadable(f"in {model_dir}"):
        model, found = _read(model_dir, dtype, base or base_of(lora), local_files_only=True, output_loading_info=True)
    if source:
        _refuse_drawn(source, model, found)
    if lora is not None:
        model = _load_adapter(model, model_dir, lora)
    return model, sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])})


def load_dequantised(model_dir: Path, dtype: str, lora: LoraSettings) -> Any:
    """Load the adapter on its base in `dtype`: the base's weights are the values that the 4-bit weights encode."""
    base = _read(model_dir, dtype, lora.base, local_files_only=True)
    return _load_adapter(base.dequantize(dtype=getattr(torch, dtype)), model_dir, lora)


def base_of(lora: "LoraSettings | None") -> str | None:
    return None if lora is None else lora.base


def _read(source: str | Path, dtype: str, base: str | None, **options: Any) -> Any:
    options["ignore_mismatched_sizes"] = True  # without it, transformers raises an error that does not name the weight
    if base is None:
        return AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype), **options)
    return import_module("inner.extras.nf4").load_nf4(source, getattr(torch, dtype), **options)


def _load_model(
    source: str, config: InnerConfig, revision: str | None, local: bool, base: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    where = {"revision": revision} if revision is not None else {}
    with refuse_unreadable(f"{source} at revision {revision}" if revision else source):
        if is_gguf_file(source):
            from inner.models.gguf import load_gguf

            model, tokenizer = load_gguf(source, config.dtype)
        else:
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local, **where)
            model, found = _read(source, config.dtype, base, local_files_only=local, output_loading_info=True, **where)
            _refuse_drawn(source, model, found)
    return model, with_padding(tokenizer, model)


@contextmanager
def refuse_unreadable(source: str) -> Iterator[None]:
    """Raise InnerError for a model's files that transformers or torch cannot read. Silence transformers' own report."""
    silence_transformers()
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, PickleError) as error:
        from inner.models.drawn import unreadable

        raise InnerError(unreadable(source, error)) from error


def _refuse_drawn(source: str, model: Any, found: Any) -> None:
    if any(found.values()):
        from inner.models.drawn import refuse_drawn

        refuse_drawn(source, model, found["missing_keys"], found["unexpected_keys"], shapes=found["mismatched_keys"])


def with_padding(tokenizer: Any, model: Any) -> Any:
    """Give the tokenizer a padding token that has an embedding, for batches of different lengths. No loss counts it."""
    pad = tokenizer.pad_token_id
    if pad is None or pad >= model.get_input_embeddings().weight.shape[0]:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def silence_transformers() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

"""Samples with MLX in the actor's process: on the GPU of a Mac, or a CPU, with each outer step's adapter.

    model in MLX ── once ──▶ linear layers ◀── set ── the run's A and B, each step
                                  │
    a prompt, read once ──▶ its KV cache × n ──▶ logits (n, V) ──▶ n draws, each with its log-prob

The model is the run's start model as a folder of transformers, or converted by `mlx_lm.convert`.  The log-probs are
those of the weights that sampled.  A replica believes rollouts of 8 bits, and doubts those of 4 bits (docs/weights.md).

Not promised: layers that MLX names in another way than transformers (experts of a mixture); models whose caches are
not keys and values of all tokens (state spaces); more tokens than a sliding window; longrope, for which MLX has other
angles.  All of these are refused by name.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from inner.errors import InnerError
from inner.extras.engines.sampling import DrawSettings, Sampled, adapter_tensors
from inner.optional import optional

PIECE = 512  # tokens of a prompt that are read in one forward
PREFIX, PARTS = "base_model.model.", {"A": "lora_a", "B": "lora_b"}  # PEFT's names -> mlx_lm's; MLX has them transposed


class MlxEngine:
    """MLX with the model in `address`: a folder, or a name on the Hub.   config: PEFT's config of the adapter."""

    name, together = "mlx", 1

    def __init__(self, address: str, config: Any) -> None:
        self._mx = _mlx("mlx.core")
        self._address = address
        self._model, told = _load_model(address, config.revision if address == config.base_model_name_or_path else None)
        self._window = window_of(told)
        self._r, self._scale = config.r, config.lora_alpha / config.r
        if strange := {type(one).__name__ for one in self._new_cache()} - {"KVCache"}:
            raise InnerError(
                f"{address} keeps {', '.join(sorted(strange))} in MLX, and this engine can copy only a KVCache of all "
                "tokens. Leave --engine out"
            )

    def load(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Put the adapter on the model's layers, in place of the previous adapter."""
        layers = dict(self._model.named_modules())
        for name, tensor in adapter_tensors(parameters).items():
            path, _, part = name.removeprefix(PREFIX).removesuffix(".weight").rpartition(".lora_")
            value = self._mx.array(tensor.T.contiguous().numpy())
            layer = self._with_adapter(path, layers)
            if layer[PARTS[part]].shape != value.shape:
                raise InnerError(
                    f"{self._address} is not the run's start model: its layer {path} takes a {PARTS[part]} of "
                    f"{layer[PARTS[part]].shape}, and the run's has {value.shape}. Give the run's model, or none"
                )
            layer[PARTS[part]] = value
        self._model.eval()

    def _with_adapter(self, path: str, layers: dict[str, Any]) -> Any:
        """Return the layer at `path`, which gets an adapter at the first call."""
        lora, utils = _mlx("mlx_lm.tuner.lora"), _mlx("mlx.utils")
        layer = layers.get(path)
        if not hasattr(layer, "weight") and not isinstance(layer, lora.LoRALinear):
            raise InnerError(
                f"MLX has no layer {path} in {self._address}. Leave out --engine, or the layer in inner.lora.targets"
            )
        if not isinstance(layer, lora.LoRALinear):
            layers[path] = layer = lora.LoRALinear.from_base(layer, r=self._r, scale=self._scale)
            self._model.update_modules(utils.tree_unflatten([(path, layer)]))
        return layer

    def sample(self, prompt: Sequence[int], n: int, settings: DrawSettings) -> Sampled:
        """Return n completions, drawn side by side; a row leaves the batch when it ends."""
        if len(prompt) + settings.most > self._window:
            raise InnerError(
                f"{self._address} has a sliding window of {self._window} tokens, which MLX may lack. A prompt of "
                f"{len(prompt)} tokens and {settings.most} of its completion would be longer. Leave --engine out, or "
                "set a smaller inner.sampling.max_completion_length"
            )
        mx, cache = self._mx, self._read(prompt[:-1])
        ids, logprobs = [list[int]() for _ in range(n)], [list[float]() for _ in range(n)]
        rows, last, key = list(range(n)), [prompt[-1]] * n, mx.random.key(settings.seed)
        _keep(cache, mx.zeros(n, dtype=mx.int32))
        while rows:
            key, drawing = mx.random.split(key)
            logits_NV = self._model(mx.array(last)[:, None], cache=cache)[:, -1].astype(mx.float32)
            logits_NV = logits_NV / settings.temperature
            logps_NV = logits_NV - mx.logsumexp(logits_NV, axis=-1, keepdims=True)
            drawn = mx.random.categorical(logps_NV, key=drawing)
            told = mx.take_along_axis(logps_NV, drawn[:, None], axis=-1)[:, 0].tolist()
            last = drawn.tolist()
            for row, token, logprob in zip(rows, last, told, strict=True):
                ids[row].append(token)
                logprobs[row].append(min(logprob, 0.0))  # rounding can lift the log of a certain token above 0
            left = [i for i, t in enumerate(last) if t not in settings.ends and len(ids[rows[i]]) < settings.most]
            if left and len(left) < len(rows):
                _keep(cache, mx.array(left))
            rows, last = [rows[i] for i in left], [last[i] for i in left]
        return ids, logprobs

    def _read(self, tokens: Sequence[int]) -> list[Any]:
        """Return the KV cache of these tokens.   MLX is lazy, so no logits are computed here."""
        cache = self._new_cache()
        for at in range(0, len(tokens), PIECE):
            self._model(self._mx.array([tokens[at : at + PIECE]]), cache=cache)
            self._mx.eval([(one.keys, one.values) for one in cache])
        return cache

    def _new_cache(self) -> list[Any]:
        return _mlx("mlx_lm.models.cache").make_prompt_cache(self._model)


def _keep(cache: list[Any], rows: Any) -> None:
    """Keep these rows of a cache, each as often as it is named; an empty cache stays empty."""
    for one in cache:
        if one.keys is not None:
            one.keys, one.values = one.keys[rows], one.values[rows]


def _load_model(address: str, revision: str | None) -> tuple[Any, dict[str, Any]]:
    """Return MLX's model of a folder, or of a name on the Hub at a commit (None: its newest), and its config.json."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    load = _mlx("mlx_lm.utils").load_model
    try:
        folder = Path(address)
        if not folder.is_dir():
            wanted = ["*.json", "model*.safetensors"]
            folder = Path(snapshot_download(address, revision=revision, allow_patterns=wanted))
        if fault := longrope_fault(json.loads((folder / "config.json").read_text())):
            raise InnerError(f"{address} {fault}")
        return load(folder, model_config=rotary_settings(folder))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, HfHubHTTPError, HFValidationError) as error:
        raise InnerError(
            f"MLX cannot load {address}: {str(error) or type(error).__name__}. Give a folder or a name on the Hub with "
            "the run's start model (config.json, model.safetensors)"
        ) from error


def rotary_settings(folder: Path) -> dict[str, Any]:
    """Return the rotary settings of a config.json by their older names, which most of MLX's models read.

    transformers 5 writes `rope_parameters`; without them, MLX would take defaults (theta 10,000) and say nothing.
    """
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    if "rope_theta" not in rope:
        return {}
    found = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    found |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope.get("partial_rotary_factor", 1.0)}  # GPT-NeoX's
    if rope.get("rope_type", "default") != "default":
        found["rope_scaling"] = {"type": rope["rope_type"], **rope}  # some of MLX's models read `type`
    return {name: value for name, value in found.items() if config.get(name) is None}


def longrope_fault(config: Mapping[str, Any]) -> str:
    """Return why MLX has other angles than transformers for this config.json; "" if it has the same.

    transformers takes the short factors up to the original length; MLX never takes them. A part of the config may have
    the factors (`text_config`, a kind of layers), and `type` may have an older name: su, or Phi-3's yarn."""
    kinds = (config.get("rope_type"), config.get("type"))
    if "longrope" not in kinds and "su" not in kinds and "long_factor" not in config:
        return next(filter(None, (longrope_fault(part) for part in config.values() if isinstance(part, Mapping))), "")
    return (
        "has rotary angles of the kind longrope. MLX always takes the long factors, transformers the short factors "
        "up to the original length, so replicas would doubt the rollouts. Leave --engine out"
    )


def window_of(config: dict[str, Any]) -> float:
    """Return the tokens of the config's sliding window (some of MLX's models have no window); ∞ without one."""
    slides = config.get("use_sliding_window", True) and config.get("sliding_window")
    return config["sliding_window"] if slides else float("inf")


def _mlx(module: str) -> Any:
    return optional(
        module,
        "--engine mlx needs the package mlx-lm, which cannot be imported here ({}). On a Mac `pip install "
        "mlx-lm==0.32.2`, elsewhere `pip install 'mlx-lm[cpu]==0.32.2'`",
    )

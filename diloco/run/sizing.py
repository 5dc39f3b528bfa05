"""Count a model's parameters, and choose the run's codec.  The codec is chosen once, when the run is created.

    parameters · replicas · bytes/s measured at the store · seconds between two syncs ──▶ codec, and why
                                                            └ an estimate, as the reason says:
                                                              H · max(0.1 s, 6 · parameters · tokens / 50 TFLOP/s)

Parameters are counted in the headers of the model's files, here or on the Hub, without torch or a loaded model.
With [inner.lora] only the adapter is sent: r · (in + out) parameters for each layer with an adapter.

Not promised: that all replicas have the bandwidth measured here.  If you know their bandwidth, name a codec.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from diloco.run.config import ConfigError, RunConfig
from inner import InnerError
from inner.models.gguf import read_gguf_header
from inner.models.naming import is_gguf_file
from inner.printable import first_line
from rendezvous.clock import Clock
from rendezvous.codecs import choose
from rendezvous.engine.probe import measure_throughput
from rendezvous.store import Store

BUILT_IN = {"tiny": 99_200, "toolworld": 97_984}  # parameters
TOKENS = 4096
FLOP_S = 50e12
LEAST_INNER_S = 0.1
BLOB = 8 << 20  # bytes of the upload that is timed, at most


def codec_of(config: RunConfig, store: Store, clock: Clock, replicas: int) -> tuple[str, str]:
    """Return (codec, why) for a new run of this config."""
    parameters = parameters_of(config)
    trained = trained_parameters_of(config) or parameters
    return choose_codec(store, clock, trained, replicas, compute_seconds_of(config, parameters))


def choose_codec(store: Store, clock: Clock, parameters: int, replicas: int, compute_s: float) -> tuple[str, str]:
    """Return (codec, why) after timing a blob's upload and download."""
    up, down = measure_throughput(store, clock, min(BLOB, 4 * parameters))
    return codec_for(parameters, replicas, up, down, compute_s)


def codec_for(parameters: int, replicas: int, up: float, down: float, compute_s: float) -> tuple[str, str]:
    """Return (codec, why).   up, down: bytes per second."""
    name, why = choose.choose_codec(parameters, replicas, up, down, compute_s)
    seen = f"{parameters / 1e6:,.1f} M parameters, {replicas} replicas, {up / 1e6:,.0f} MB/s up, {down / 1e6:,.0f} down"
    return name, f"{why} ({seen}; the time between syncs is a guess)"


def compute_seconds(parameters: int, sync_every: int, tokens: int = TOKENS) -> float:
    """Estimate the seconds between two syncs of the whole model."""
    return sync_every * max(LEAST_INNER_S, 6 * parameters * tokens / FLOP_S)


def compute_seconds_of(config: RunConfig, parameters: int) -> float:
    inner = config.inner
    outer = config.outer
    length = inner.data.context_length if inner.loop == "supervised" else inner.completion_length
    tokens = inner.batch_size * inner.gradient_accumulation_steps * length
    return min(compute_seconds(parameters, outer.sync_every, tokens), outer.sync_seconds or float("inf"))


def parameters_of(config: RunConfig) -> int:
    """Return the number of parameters of the run's model.  Raises ConfigError."""
    return _parameters_in(config, _shapes_of(config))


def trained_parameters_of(config: RunConfig) -> int | None:
    """Count the adapter's parameters by the shapes in the model's files; None without an adapter or known layers.

    In a .gguf file, all layers count, because their names differ.  The layers of a mixture of experts differ between
    its files and the loaded model, so the model is built, without its weights.   Raises ConfigError."""
    return None if config.inner.lora is None else _trained_in(config, _shapes_of(config))


def sizes_of(config: RunConfig) -> dict[str, Any]:
    """Return the numbers that `footprint` takes; the shapes are read once.   Raises ConfigError.

    parameters, trained: as above.   quantised: the base's parameters that inner.lora.base keeps in 4 bits."""
    shapes, lora = _shapes_of(config), config.inner.lora
    quantised = linear_shapes(shapes) if lora is not None and lora.base is not None else {}
    return {
        "parameters": _parameters_in(config, shapes),
        "trained": _trained_in(config, shapes),
        "quantised": sum(map(prod, quantised.values())),
    }


Shapes = Mapping[str, Sequence[int]]  # weight -> shape (out, in)


def _parameters_in(config: RunConfig, shapes: Shapes) -> int:
    return BUILT_IN.get(config.inner.model) or sum(map(prod, shapes.values()))


def _trained_in(config: RunConfig, shapes: Shapes) -> int | None:
    inner, gguf = config.inner, is_gguf_file(config.inner.model)
    if (lora := inner.lora) is None:
        return None
    if not gguf and any(".experts." in name or "router" in name for name in shapes):
        from inner.models.hub_model import cached_file
        from inner.models.lora import adapter_size

        with suppress(Exception):  # a model that this machine's transformers does not know
            folder = _folder_of(config) or cached_file(inner.model, inner.revision or "main", "config.json").parent
            return adapter_size(folder, lora)
    return adapter_parameters(shapes, lora.r, [] if gguf else lora.names, lora.freeze_a) or None


def _shapes_of(config: RunConfig) -> Shapes:
    """Return weight -> shape (out, in), by the headers of the model's files, here or on the Hub; {} if it is built in.

    Raises ConfigError."""
    if (model := config.inner.model) in BUILT_IN:
        return {}
    if is_gguf_file(model):
        return _shapes_of_gguf(model)
    if (folder := _folder_of(config)) is not None and (found := _shapes_of_folder(folder)):
        return found
    if Path(model).is_dir():
        raise ConfigError(f"{model} holds no .safetensors file to count parameters in; {_ADVICE}")
    files = _metadata_on_the_hub(model, config.inner.revision).files_metadata.values()
    return {name: tensor.shape for file in files for name, tensor in file.tensors.items()}


def _folder_of(config: RunConfig) -> Path | None:
    """Return the model's folder on this machine: its own, or the cache of the Hub's client."""
    from inner.models.known import cached_snapshot  # imported here, because a model that is built in code has no files

    model = config.inner.model
    return Path(model) if Path(model).is_dir() else cached_snapshot(model, config.inner.revision)


def linear_shapes(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return layer -> shape of the linear layers but the head.   shapes: weight -> shape."""
    found = {n.removesuffix(".weight"): s for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2}
    return {layer: shape for layer, shape in found.items() if not layer.endswith(_NOT_ADAPTED)}


def adapter_parameters(shapes: Mapping[str, Sequence[int]], r: int, names: Sequence[str], freeze_a: bool) -> int:
    """Count an adapter's parameters.   shapes: weight -> shape.   names: layers; []: all but embeddings and head."""
    adapted = linear_shapes(shapes).items()
    chosen = [s for layer, s in adapted if not names or any(layer == n or layer.endswith(f".{n}") for n in names)]
    return sum(r * (shape[0] if freeze_a else sum(shape)) for shape in chosen)


_NOT_ADAPTED = ("embed_tokens", "token_embd", "lm_head", "wte", "wpe")


def _shapes_of_gguf(model: str) -> dict[str, Sequence[int]]:
    try:
        return {name: shape[::-1] for name, shape in read_gguf_header(Path(model)).shapes.items()}
    except InnerError as error:
        raise ConfigError(str(error)) from error


def _shapes_of_folder(folder: Path) -> dict[str, Sequence[int]]:
    """Return weight -> shape by the headers of the .safetensors files; {} unless all files are there."""
    from inner.models.known import weight_files

    paths = weight_files(folder, str(folder))
    if not all(path.suffix == ".safetensors" and path.is_file() for path in paths):
        return {}
    return {name: shape for path in paths for name, shape in _shapes_in(path).items()}


def _shapes_in(path: Path) -> dict[str, list[int]]:
    """Read the shapes from the header: 8 bytes of length, then JSON."""
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}


def stored_bytes(model: str, revision: str | None) -> int:
    """Return the bytes of a model on the Hub, in its stored dtypes.  Raises ConfigError."""
    counts = _metadata_on_the_hub(model, revision).parameter_count
    return sum(DTYPE_BYTES.get(str(dtype), 4) * count for dtype, count in counts.items())


def _metadata_on_the_hub(model: str, revision: str | None) -> Any:
    """Return the Hub client's SafetensorsRepoMetadata.   Raises ConfigError."""
    from huggingface_hub import HfApi

    try:
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        return api.get_safetensors_metadata(model, revision=revision)
    except Exception as error:  # no network, no such model, a private model, no safetensors: the same advice helps
        why = first_line(error)
        raise ConfigError(f"cannot count the parameters of {model}: {why}. {_ADVICE[0].upper()}{_ADVICE[1:]}") from None


DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}  # of safetensors
_ADVICE = "give --parameters N instead (doctor), or name a codec instead of auto"

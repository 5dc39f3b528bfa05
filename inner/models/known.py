"""Check that the start model exists without loading it: file names, sizes, headers, and one request to the Hub.

    inner.model   toolworld, tiny ─▶ built in code
                  a .gguf file    ─▶ its header: an architecture that transformers reads
                  a folder        ─▶ config.json · weights, each as long as its header says · tokenizer · chat template
                  a Hub id        ─▶ in the cache: the same checks    not there: one request, at most ASK_S seconds
                                       └─ no such model, no such revision, gated: refused      no answer: "not checked"

Not promised: that the weights load; that the model still exists when a replica loads it.  No torch here.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from safetensors import SafetensorError, safe_open

from inner.models.gguf import GgufHeader, check_gguf_file
from inner.models.heads import check_head
from inner.models.naming import ASK_S, NOT_CHECKED, KnownModel, is_gguf_file
from inner.settings.inner import BUILT_IN_MODELS, InnerConfig, InnerError

OF_HUB = re.compile(r"^\s*(hub:|(https?://)?(www\.)?(huggingface\.co|hf\.co)/)")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
TOWERS = ("vision_config", "audio_config", "video_config", "speech_config", "image_config", "vq_config", "vit_config")
MULTIMODAL = ("image-text-to-text", "any-to-any", "audio-text-to-text", "video-text-to-text", "image-to-text")
QUANTISED = ("quantization_config", "compression_config")
PAD_READERS = ("rwkv", "recurrent_gemma", "ctrl")  # their state or positions ignore the attention mask
LFS = b"version https://git-lfs"


def known_model(config: InnerConfig, ask: Callable[[str, str | None], None] | None = None) -> KnownModel:
    """Find the model and check its files.   Raises InnerError if it certainly cannot be loaded.

    ask(model, revision): asks the Hub (default: online)."""
    model = config.model
    if model in BUILT_IN_MODELS:
        return KnownModel()
    if is_gguf_file(model):
        return KnownModel(note=_gguf_note(config, check_gguf_file(Path(model))))
    if Path(model).is_dir():
        return KnownModel(Path(model), _check_folder(Path(model), f"model = {model!r}", config))
    if Path(model).is_file():
        raise InnerError(f"model = {model!r} is a file. Name the folder that has it: {str(Path(model).parent)!r}.")
    if HUB_ID.fullmatch(model) is None or model.startswith("."):
        name = OF_HUB.sub("", model).strip("/ ")
        hint = f" Did you mean {name!r}?" if name != model and HUB_ID.fullmatch(name) else ""
        raise InnerError(
            f"model = {model!r}: there is no such folder here ({Path(model).absolute()}), and it is not a name on the "
            f"Hub, which looks like Qwen/Qwen2.5-0.5B-Instruct. Correct inner.model.{hint}"
        )
    if (folder := cached_snapshot(model, config.revision)) is not None:
        where = f"model = {model!r}, as cached in {folder}"
        return KnownModel(folder, _check_folder(folder, where, config, whole=False))
    return KnownModel(note=_ask_in_time(model, config.revision, ask or ask_hub))


def folder_or_refusal(config: InnerConfig) -> Path | None:
    """Return the model's folder on this machine, with its tokenizer; None if the files can be downloaded.

    Raises InnerError within about ASK_S seconds if the files are not here and cannot be downloaded."""
    known = known_model(config)
    if known.folder is not None and any((known.folder / name).is_file() for name in TOKENIZERS):
        return known.folder
    unreachable = ("" if known.folder else known.note) or _ask_in_time(config.model, config.revision, ask_hub)
    if config.model in BUILT_IN_MODELS or is_gguf_file(config.model) or not unreachable:
        return None
    why = unreachable.partition(": ")[2].partition(": ")[2]
    raise InnerError(
        f"inner.model = {config.model!r}: its tokenizer is not in this machine's cache ({cache_folder()}), and the Hub "
        f"cannot be asked: {why}. Give a folder that has the model (--set inner.model=FOLDER), or a cache that has it "
        "(HF_HUB_CACHE=FOLDER; with HF_HUB_OFFLINE=1 the network is not asked), or try again with a network"
    )


def _gguf_note(config: InnerConfig, header: GgufHeader) -> str:
    kinds = ", ".join(header.quantised)
    rounding = f"from {kinds}; training begins at these rounded weights" if kinds else "without loss"
    return f"{Path(config.model).name} is dequantised to {config.dtype} ({rounding}); the run carries these weights"


def cached_snapshot(model: str, revision: str | None) -> Path | None:
    """Return a Hub model's snapshot folder in this machine's cache; None if the cache does not have it."""
    from huggingface_hub import try_to_load_from_cache

    with suppress(ValueError):  # a name that the Hub does not allow
        found = try_to_load_from_cache(model, "config.json", cache_dir=cache_folder(), revision=revision)
        return Path(found).parent if isinstance(found, str) else None
    return None


def cache_folder(environ: Any = os.environ) -> Path:
    """Return the folder of the Hub client's downloads."""
    home = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(environ.get("HF_HUB_CACHE") or Path(environ.get("HF_HOME") or home) / "hub")


# -------------------------------------------------------------------- a folder


def _check_folder(folder: Path, what: str, asked: InnerConfig, whole: bool = True) -> str:
    """Return a warning about its head, or "".   Raises InnerError for a folder without a language model.

    whole: require weights and tokenizer, too (a cache may not have these files yet)."""
    refuse_adapter(folder, what)
    if not (folder / "config.json").is_file():
        raise InnerError(f"{what} has no config.json. Give a folder that save_pretrained wrote, or a name on the Hub.")
    refuse_pointers((folder / name for name in ("config.json", *TOKENIZERS)), what)
    config = read_json(folder / "config.json", what)
    weights = weight_files(folder, what)
    missing = [path.name for path in weights if not path.is_file()]
    if whole and (missing or not weights):
        lack = f"lacks {missing[0]}, which its index names" if missing else "has no weights (*.safetensors)"
        raise InnerError(f"{what} {lack}. Save, copy or download the whole model, or give another inner.model.")
    names = [name for path in weights if path.is_file() for name in _check_weights(path, what)]
    if whole:
        require_tokenizer(folder, what)
    refuse_config(config, asked)
    return check_head(config, () if missing else names, asked.model)


def require_tokenizer(folder: Path, what: str) -> None:
    """Raise InnerError for a folder without a tokenizer."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise InnerError(
            f"{what} has no tokenizer ({TOKENIZERS[0]}, …). Next: tokenizer.save_pretrained({str(folder)!r})"
        )


def refuse_adapter(folder: Path, what: str) -> None:
    """Raise InnerError for a folder with an adapter of PEFT. from_pretrained would load it, frozen, on its base."""
    if (path := folder / "adapter_config.json").is_file():
        refuse_pointers([path], what)
        base = read_json(path, what).get("base_model_name_or_path") or "another model"
        raise InnerError(_ADAPTER.format(what, str(folder), base))


def refuse_hub_adapter(model: str, names: Iterable[str]) -> None:
    """Raise InnerError for a repository with an adapter of PEFT.   names: the repository's files."""
    if "adapter_config.json" in names:
        raise InnerError(_ADAPTER.format(f"model = {model!r}", model, "another model"))


def read_json(path: Path, what: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InnerError(f"{what}: {path.name} cannot be read: {error}. Download or save it again.") from error


def refuse_config(config: Any, asked: InnerConfig) -> None:
    """Raise InnerError for a kind of model that a run cannot train.   config: the contents of config.json."""
    refuse_towers(config, asked.model)
    refuse_quantised(config, asked.model)
    refuse_pad_reader(config, asked)
    refuse_outputs(config, asked.model)


def refuse_towers(config: Any, model: str) -> None:
    """Raise InnerError for a model that also takes images, sound or video.   config: the contents of config.json."""
    towers = sorted(name for name in config if name.endswith(TOWERS)) if isinstance(config, dict) else []
    if towers:
        raise InnerError(
            f"model = {model!r} is a multimodal checkpoint: its config.json has {', '.join(towers)}. A run trains "
            "language models on text. The run would count, send and update parts that never see an input, or "
            "`diloco export` would omit them. Use the family's text-only checkpoint, or save only the language model "
            "(docs/faq.md has the lines). Then set inner.model to that folder."
        )


def refuse_quantised(config: Any, model: str) -> None:
    """Raise InnerError for a model with quantised weights.   config: the contents of config.json."""
    keys = [key for key in QUANTISED if isinstance(config, dict) and config.get(key)]
    if keys:
        how = config[keys[0]].get("quant_method", "") if isinstance(config[keys[0]], dict) else ""
        raise InnerError(
            f"model = {model!r} is quantised: its config.json has {keys[0]} {how}".rstrip() + ". A run trains and "
            "averages floating-point weights. Set inner.model to the model that it was made from; for a base in 4 "
            'bits, add inner.lora.base = "nf4". If only this form exists, load it with transformers and '
            "dequantize=True in its quantization config, save_pretrained it, and set inner.model to that folder."
        )


def refuse_pad_reader(config: Any, asked: InnerConfig) -> None:
    """Raise InnerError for a model that reads the padding in front of a row.   config: the contents of config.json."""
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind in PAD_READERS and asked.loop == "grpo":  # other loops pad behind the row
        raise InnerError(
            f"model = {asked.model!r} is a {kind} model, whose answer depends on the padding in front of its prompt. "
            "Prompts of a batch have different lengths, so the run would train another policy than the one that "
            "answers. Set inner.model to a model of another architecture."
        )


def refuse_outputs(config: Any, model: str) -> None:
    """Raise InnerError for outputs with which transformers cannot generate.   config: the contents of config.json."""
    read = config.get if isinstance(config, dict) else {}.get
    attends = read("output_attentions") is True and read("_attn_implementation") != "eager"
    if attends or read("return_dict") is False:
        raise InnerError(
            f"model = {model!r} has {'output_attentions = true' if attends else 'return_dict = false'} in its "
            "config.json. With it, transformers cannot save this model or generate. Take this line out of config.json."
        )


def _check_weights(path: Path, what: str) -> list[str]:
    """Return the weights' names; none for a .bin.   Raises InnerError for a Git LFS pointer or a truncated file."""
    refuse_pointers([path], what)
    if path.suffix == ".bin":
        with path.open("rb") as file:  # torch.save writes a zip file, whose directory is at its end
            cut = file.read(2) == b"PK" and not is_zipfile(path)
        if cut:
            raise InnerError(f"{what}: {path.name} is cut off. Save or download it again.")
        return []
    try:
        with safe_open(path, "numpy") as weights:
            return list(weights.keys())
    except SafetensorError as error:
        raise InnerError(
            f"{what}: {path.name} is cut off, or no safetensors file ({error}). Save or download it again."
        ) from None


def refuse_pointers(paths: Iterable[Path], what: str) -> None:
    """Raise InnerError for a file that is a Git LFS pointer."""
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                if file.read(len(LFS)) == LFS:
                    raise InnerError(
                        f"{what}: {path.name} is a Git LFS pointer, not the file. Next: `git lfs pull` there."
                    )


def weight_files(folder: Path, what: str) -> list[Path]:
    """Return the weight files that from_pretrained reads, also those that are missing; other files do not matter."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        if (index := folder / f"{name}.index.json").is_file():
            shards = read_json(index, what).get("weight_map", {}).values()
            return [folder / shard for shard in sorted(set(shards))]
    return []


def chat_template(folder: Path) -> bool | None:
    """Whether the folder's tokenizer has a chat template.  None: the files do not show it."""
    if any(folder.glob("chat_template*")):
        return True
    path = folder / "tokenizer_config.json"
    return bool(read_json(path, str(folder)).get("chat_template")) if path.is_file() else None


# -------------------------------------------------------------------- the Hub


def _ask_in_time(model: str, revision: str | None, ask: Callable[[str, str | None], None]) -> str:
    """Return "" if the Hub has the model, else why we could not ask.  Raises InnerError if the Hub refuses."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return f"{NOT_CHECKED}whether {model} is on the Hub: offline (HF_HUB_OFFLINE)"
    outcome: list[Exception | None] = []

    def run() -> None:
        try:
            ask(model, revision)
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)  # a DNS lookup cannot be interrupted
    thread.start()
    thread.join(ASK_S)
    if not outcome:
        return f"{NOT_CHECKED}whether {model} is on the Hub: no answer within {ASK_S:.0f} s"
    if isinstance(outcome[0], InnerError):
        raise outcome[0]
    if outcome[0] is not None:
        from inner.network import network_words

        return f"{NOT_CHECKED}whether {model} is on the Hub: offline ({network_words(outcome[0])})"
    return ""


def ask_hub(model: str, revision: str | None) -> None:
    """Ask the Hub for the model: one request; more for a gated or multimodal model.

    Raises InnerError if the Hub refuses; other errors of the client are not caught."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        info = HfApi(endpoint=endpoint).model_info(model, revision=revision, timeout=ASK_S)
    except GatedRepoError:
        raise InnerError(_GATED.format(model)) from None
    except RevisionNotFoundError:
        raise InnerError(
            f"model = {model!r} has no revision {revision!r} on the Hub. Correct inner.revision."
        ) from None
    except RepositoryNotFoundError:
        raise InnerError(
            f"model = {model!r}: the Hub knows no such model (or it is private, and no token here may read it). "
            "Correct inner.model, or `hf auth login`."
        ) from None
    if getattr(info, "gated", False) and not _may_read(model, revision, endpoint):
        raise InnerError(_GATED.format(model))
    config = getattr(info, "config", None)
    refuse_hub_adapter(model, [file.rfilename for file in getattr(info, "siblings", None) or ()])
    check_head(config, (), model)
    refuse_quantised(config, model)
    if getattr(info, "pipeline_tag", None) in MULTIMODAL:  # config.json decides
        path = hf_hub_download(model, "config.json", revision=revision, endpoint=endpoint)
        refuse_towers(read_json(Path(path), f"model = {model!r}"), model)


def _may_read(model: str, revision: str | None, endpoint: str | None) -> bool:
    """Whether this machine's token may read the model's files."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import GatedRepoError

    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json", revision=revision, endpoint=endpoint), timeout=ASK_S)
    except GatedRepoError:
        return False
    return True


_ADAPTER = (
    "{0} has an adapter (adapter_config.json), of {2}. Merge it into that model first: "
    "AutoPeftModelForCausalLM.from_pretrained({1!r}).merge_and_unload().save_pretrained('merged'), copy the tokenizer "
    "there, and set inner.model to that folder; or move the files adapter_* away, to train a model without it."
)
_GATED = (
    "model = {0!r} is gated: the token of this machine may not read it. Accept its licence at "
    "https://huggingface.co/{0}, `hf auth login`, and give replicas elsewhere the token: --secret HF_TOKEN."
)

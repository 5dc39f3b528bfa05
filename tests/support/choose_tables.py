"""The numbers of docs/choose.md, by the project's own estimators: `python -m tests.support.choose_tables` writes them.

    shapes of known models ──▶ diloco/run/sizing.py, diloco/run/footprint.py ──▶ VRAM, RAM, bucket, seconds of a sync
                               executors/platforms/on_modal/kinds.py ──▶ dollars per hour

Between <!-- computed NAME --> and <!-- end --> of the page.   GPU: the cheapest of Modal's list that is at least
ROOM times as large as the training states; activations and generation have the rest.  If no GPU is, the cheapest four
or eight are.

Not promised: that ROOM is enough for long completions or a reference engine beside it.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

from diloco.run.config import OuterConfig, RunConfig
from diloco.run.footprint import LINK, Footprint, delta_bytes, footprint, lines
from diloco.run.sections import keep_bytes
from diloco.run.sizing import adapter_parameters, linear_shapes
from diloco.units import byte_size, duration
from executors.platforms.machine.gpu import devices_of
from executors.platforms.on_modal.kinds import AS_OF, CORES, DAY_S, USD_PER_HOUR, Kind, memory_limit_mib
from inner.settings.inner import InnerConfig
from inner.settings.task import DataSettings, LoraSettings, RewardSettings, SamplingSettings
from rendezvous.codecs.choose import sync_seconds
from tests.support.site_pages import DOCS

PAGE = DOCS / "choose.md"
ROOM = 1.6
VRAM = {
    "T4": 16,
    "L4": 24,
    "A10": 24,
    "L40S": 48,
    "A100-40GB": 40,
    "A100-80GB": 80,
    "H100": 80,
    "H200": 141,
    "B200": 180,
}  # GB
SEVERAL = (1, 4, 8)  # devices of one replica
CODECS = ("fp32", "bf16", "int8", "int4")
ON_THE_HUB = 2  # bytes per parameter: bfloat16
REPLICAS = 4
RANK = 16


@dataclass(frozen=True)
class Model:
    """A Llama-like model on the Hub.   tied: its head is its embedding.   biased: its q, k, v have biases."""

    name: str
    width: int
    layers: int
    kv: int
    mlp: int
    vocabulary: int
    tied: bool = True
    biased: bool = True

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        w, kv, mlp = self.width, self.kv, self.mlp
        layer = {"q_proj": (w, w), "k_proj": (kv, w), "v_proj": (kv, w), "o_proj": (w, w)}
        layer |= {"gate_proj": (mlp, w), "up_proj": (mlp, w), "down_proj": (w, mlp)}
        found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocabulary, w), "norm.weight": (w,)}
        found |= {} if self.tied else {"lm_head.weight": (self.vocabulary, w)}
        for i in range(self.layers):
            found |= {f"{i}.{name}.weight": shape for name, shape in layer.items()}
            found |= {f"{i}.norm1.weight": (w,), f"{i}.norm2.weight": (w,)}
            if self.biased:
                found |= {f"{i}.{name}.bias": (layer[name][0],) for name in ("q_proj", "k_proj", "v_proj")}
        return found

    @property
    def parameters(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def adapter(self) -> int:
        return adapter_parameters(self.shapes, RANK, [], False)


MODELS = (
    Model("SmolLM2-135M", 576, 30, 192, 1536, 49152, biased=False),
    Model("Qwen2.5-0.5B", 896, 24, 128, 4864, 151936),
    Model("Qwen2.5-1.5B", 1536, 28, 256, 8960, 151936),
    Model("Qwen2.5-3B", 2048, 36, 256, 11008, 151936),
    Model("Qwen2.5-7B", 3584, 28, 512, 18944, 152064, tied=False),
    Model("Qwen2.5-14B", 5120, 48, 1024, 13824, 152064, tied=False),
    Model("Qwen2.5-32B", 5120, 64, 1024, 27648, 152064, tied=False),
)
BY_NAME = {model.name: model for model in MODELS}


def run_of(
    model: Model, *, lora: bool, base: str | None = None, dtype: str = "float32", codec: str = "fp32",
    sync_every: int = 8,
) -> RunConfig:  # fmt: skip
    inner = InnerConfig(
        model=f"Hub/{model.name}",
        dtype=dtype,
        data=DataSettings(prompts="prompts.jsonl"),
        rewards=RewardSettings(function="rewards.py:score"),
        sampling=SamplingSettings(max_completion_length=512),
        lora=LoraSettings(r=RANK, base=base) if lora else None,
    )
    return RunConfig(inner=inner, outer=OuterConfig(codec=codec, sync_every=sync_every))


def sized(
    model: Model, *, lora: bool, replicas: int = REPLICAS, steps: int = 100, devices: int = 1, **settings: Any
) -> Footprint:
    config = run_of(model, lora=lora, **settings)
    quantised = sum(map(prod, linear_shapes(model.shapes).values())) if settings.get("base") else 0
    trained = model.adapter if lora else None
    return footprint(config, model.parameters, replicas, steps, trained, quantised, devices)


def gpu_for(device: int) -> str:
    large = [gpu for gpu, gigabytes in VRAM.items() if gigabytes * 1e9 >= ROOM * device]
    return min(large, key=lambda gpu: USD_PER_HOUR[gpu], default="")


def placed(model: Model, **settings: Any) -> tuple[Footprint, str]:
    """Return the footprint and the GPUs of the smallest replica that has room; "" if there is none."""
    for devices in SEVERAL:
        found = sized(model, devices=devices, **settings)
        if gpu := gpu_for(found.device):
            return found, f"{gpu}:{devices}" if devices > 1 else gpu
    return found, ""


def usd_per_hour(gpu: str, model: Model, *, lora: bool, **_: Any) -> float:
    """The price of one container at its limits, as `diloco plan` reckons it."""
    devices = devices_of(gpu)
    limit = memory_limit_mib(model.parameters, model.adapter if lora else None, devices)
    cores = CORES * devices
    kind = Kind((gpu,), DAY_S, (), "", cores=cores, memory_mib=8192, max_cores=2 * cores, max_memory_mib=limit)
    return kind.usd_per_hour({}) or 0.0


# -------------------------------------------------------------------- the tables


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def memory_table() -> str:
    rows = [_memory_row(model, "adapter", lora=True) for model in MODELS[1:]]
    rows += [_memory_row(model, "adapter, base in 4 bits", lora=True, base="nf4") for model in MODELS[-2:]]
    rows += [_memory_row(model, "all weights", lora=False) for model in MODELS[:-1]]
    rows += [_memory_row(model, "all, bfloat16", lora=False, dtype="bfloat16") for model in MODELS[4:]]
    head = (
        "model",
        "trained",
        "VRAM, states",
        "RAM",
        "disk",
        "bucket per step",
        "per snapshot",
        "GPU",
        "dollars per hour",
    )
    return table(head, rows)


def _memory_row(model: Model, what: str, **settings: Any) -> tuple[str, ...]:
    found, gpu = placed(model, **settings)
    price = f"{usd_per_hour(gpu, model, **settings):.2f}" if gpu else ""
    sizes = (found.host, ON_THE_HUB * model.parameters, found.each_step, found.each_snapshot)
    device = f"{byte_size(found.device)}{f' on each of {found.devices}' if found.devices > 1 else ''}"
    return (model.name, what, device, *(byte_size(size) for size in sizes), gpu or "none of 8 devices", price)


def sync_table() -> str:
    rows = [_sync_row(f"{m.name}, adapter", m.adapter) for m in MODELS[::2]]
    rows += [_sync_row(m.name, m.parameters) for m in MODELS[::2]]
    return table(("trained", "bytes in fp32", *CODECS), rows)


def _sync_row(name: str, parameters: int) -> tuple[str, ...]:
    took = [duration(sync_seconds(codec, parameters, REPLICAS, LINK, LINK)) for codec in CODECS]
    return (name, byte_size(delta_bytes(parameters, "fp32")), *took)


def example(name: str, replicas: int, steps: int, **settings: Any) -> str:
    """One worked example as `diloco plan` would say it, and its price on Modal."""
    model = BY_NAME[name]
    found, gpu = placed(model, replicas=replicas, steps=steps, **settings)
    said = lines(found, steps, keep_bytes(RunConfig().fleet.keep))
    hour = usd_per_hour(gpu, model, **settings) * replicas
    price = f"${hour:.2f} per hour in all (list of {AS_OF}); 10 hours: ${10 * hour:.0f}"
    said.append(f"{replicas} × {gpu} on Modal: {price}")
    return "```text\n" + "\n".join(said) + "\n```"


COMPUTED = {
    "memory": memory_table,
    "sync": sync_table,
    "middle": lambda: example("Qwen2.5-1.5B", 4, 100, lora=True),
    "large": lambda: example("Qwen2.5-3B", 4, 100, lora=False, dtype="bfloat16", codec="int8"),
}


def page_with_numbers(text: str) -> str:
    for name, compute in COMPUTED.items():
        before, mark, rest = text.partition(f"<!-- computed {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert mark and end, f"docs/choose.md has no place for {name}"
        text = f"{before}{mark}\n{compute()}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page_with_numbers(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

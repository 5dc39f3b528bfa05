"""The package versions for replicas that generate with vLLM, and a check that they work together.

    constraints-vllm.txt ──▶ Modal         its image has exactly these versions ┐
                         ──▶ HF Jobs, sky  constraints of the installation      ├─▶ python -c CHECK ─▶ the replica
                                                                                ┘   the last line of an image's build,
                                                                                    else the job's first line

The launching machine's versions cannot be used: transformers 5.23 and vLLM 0.31 exclude each other.

Not promised: that vLLM finds a GPU; a replica reports that when it starts.
"""

import shlex
from pathlib import Path

PINS = Path(__file__).with_name("constraints-vllm.txt")
EXTRAS = "train,diloco,replay"  # of the project; `serverless` needs another huggingface_hub
NEEDS = ("fsspec", "obstore", "vllm")  # packages in addition to the extras
CHECK = "import vllm, trl; from trl.import_utils import is_vllm_available; assert is_vllm_available()"


def vllm_requirements() -> list[str]:
    """Return name==version of every package, except those whose versions torch's wheel chooses."""
    lines = PINS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pinned_version(name: str) -> str:
    """Return the pin of a package: "vllm" -> "vllm==0.31.0"."""
    return next(line for line in vllm_requirements() if line.startswith(f"{name}=="))


def check_command() -> str:
    """Return a shell command that fails if vLLM and TRL cannot be imported together."""
    return f"python -c {shlex.quote(CHECK)}"

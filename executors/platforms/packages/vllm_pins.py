"""The versions for replicas that generate with vLLM, and a proof that they hold together.

    constraints-vllm.txt ──▶ Modal         its image has these very versions    ┐
                         ──▶ HF Jobs, sky  constraints of the installation      ├─▶ python -c CHECK ─▶ the replica
                                                                                ┘   the last line of the build; where
                                                                                    nothing is built, the job's first

What is installed on the launching machine is of no use here: transformers 5.23 and vLLM 0.31 exclude each other.

Not promised: that what CHECK imports finds a GPU; a replica says so when it starts.
"""

import shlex
from pathlib import Path

PINS = Path(__file__).with_name("constraints-vllm.txt")
EXTRAS = "train,diloco,replay"  # of the project; `serverless` wants another huggingface_hub
NEEDS = ("fsspec", "obstore", "vllm")  # beside them
CHECK = "import vllm, trl; from trl.import_utils import is_vllm_available; assert is_vllm_available()"


def vllm_requirements() -> list[str]:
    """name==version of every package, without those that torch's own wheel chooses."""
    lines = PINS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pinned_version(name: str) -> str:
    """ "vllm" -> "vllm==0.31.0" """
    return next(line for line in vllm_requirements() if line.startswith(f"{name}=="))


def check_command() -> str:
    """A line of shell that fails where vLLM and TRL cannot be imported together."""
    return f"python -c {shlex.quote(CHECK)}"

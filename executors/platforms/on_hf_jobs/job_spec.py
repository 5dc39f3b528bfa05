"""Converts a spec into the arguments of a Hugging Face job.

    spec ─▶ checked  its flavor; or a fault: unknown hardware (with a list), a run on this machine, a missing secret
         ─▶ job      image    one with uv and the Python of this machine
                     command  uv run --with-requirements /code/{digest}/requirements.txt python -m …container …
                              with vLLM: before it, the same uv run, which imports vLLM as a check
                              code = "image": only python -m …; the image has all packages
                     volumes  the bucket NAMESPACE/diloco-code, read-only at /code; uploaded before the first job
                     secrets  values by name from this environment; stored nowhere else

Not promised: that the image has the system libraries that a GPU needs in addition to the wheels of torch.
"""

import json
import os
import shlex
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from diloco.units import dollars
from executors.platforms.base import ExecutorError, ReplicaSpec
from executors.platforms.on_hf_jobs.client import NAMESPACE, Hub
from executors.platforms.packages.versions import check_command, pinned_version
from executors.platforms.packages.wheel import Shipment, pack_code
from rendezvous.stores.open import stays_here

CONTAINER = "executors.platforms.container"
CLIENT = "executors.platforms.on_hf_jobs.client"
MOUNT = "/code"
BUCKET = "diloco-code"
IMAGE = f"ghcr.io/astral-sh/uv:python{sys.version_info.major}.{sys.version_info.minor}-bookworm"
INSTALLED = "image"  # a value of `code`
TIMEOUT_S = 6 * 3600.0
START_S = 900  # added to the platform's limit, for the download of packages before the replica's own clock starts
CPU = "cpu-basic"


@dataclass
class Recipe:
    """Makes jobs from specs.  The fields are the arguments of HFJobsExecutor."""

    hub: Hub
    hardware: str
    timeout_s: float
    secrets: tuple[str, ...]
    env: Mapping[str, str]
    image: str
    packages: tuple[str, ...]
    code: str
    pip: tuple[str, ...] = ()
    vllm: bool = False
    _shipments: dict[bool, Shipment] = field(default_factory=dict)
    _uploaded: dict[bool, str] = field(default_factory=dict)
    _lock: Any = field(default_factory=threading.Lock)

    def checked(self, spec: ReplicaSpec) -> tuple[str, str]:
        """Return (flavor, reason why the spec cannot start, or "").  Raise ExecutorError for a fault of all specs."""
        self._secret_values(spec)
        if stays_here(spec.run):
            raise ExecutorError(
                f"{spec.run} is on this machine, and Hugging Face Jobs cannot reach it. Next: a run in a bucket, "
                "as --run s3://bucket/run"
            )
        prices = self.hub.prices()
        wanted = spec.gpu or (self.hardware,)
        if known := [flavor for flavor in wanted if flavor in prices]:
            return known[0], ""
        there = " · ".join(f"{f} {'?' if p is None else dollars(p)[1:]}" for f, p in prices.items())
        return wanted[0], f"{spec.slot}: no hardware is called {' or '.join(wanted)}; there are (USD per hour): {there}"

    def flavor(self, spec: ReplicaSpec) -> str:
        return self.checked(spec)[0]

    def job(self, spec: ReplicaSpec, flavor: str, module: str = CONTAINER, *more: str) -> dict[str, Any]:
        """Return the arguments of run_job.   module: the job runs it with the spec, the executor's name and `more`."""
        more = (*more, f"{CLIENT}:until_here") if spec.lease_s else more
        request = json.dumps(replace(spec, timeout_s=self._lifetime_s(spec)).to_dict())
        vllm = self.vllm and module == CONTAINER  # a supervisor needs the Jobs client, not vLLM's versions
        uv, volumes = self._uv_command(vllm)
        checked = ["sh", "-c", f'{shlex.join(uv)} {check_command()} && exec "$@"', "sh"] if vllm else []
        return {
            "image": self.image,
            "command": [*checked, *uv, "python", "-m", module, request, "hf-jobs", *more],
            "env": {**self.env, **({NAMESPACE: self.hub.namespace} if spec.lease_s else {})},
            "secrets": self._secret_values(spec),
            "flavor": flavor,
            "volumes": volumes,
        }

    def limit(self, spec: ReplicaSpec) -> int:
        """Return the platform's time limit in seconds; the replica ends by itself before that limit."""
        return int(self._lifetime_s(spec)) + START_S

    def _lifetime_s(self, spec: ReplicaSpec) -> float:
        return spec.timeout_s or self.timeout_s

    # ------------------------------------------------------------------ in words

    def line(self, spec: ReplicaSpec, flavor: str) -> str:
        price = self.hub.prices().get(flavor)
        cost = "its price is unknown" if price is None else f"{dollars(price)[1:]} USD per hour"
        limit = timedelta(seconds=self.limit(spec))
        return f"a job of {self.hub.namespace} on {flavor}, {cost}, at most {limit} h, image {self.image}"

    def names(self, spec: ReplicaSpec) -> list[str]:
        """Return the names of the spec's and the executor's secrets."""
        return list(dict.fromkeys([*self.secrets, *spec.secrets]))

    def code_words(self) -> str:
        if not self.downloads:
            return f"what {self.image} has installed"
        if self.code:
            return self.code
        shipment = self._pack_once(self.vllm)
        words = f"{shipment.wheel}, {shipment.digest}, through the bucket {self.hub.namespace}/{BUCKET}"
        words += f" (without {', '.join(shipment.left_out)})" if shipment.left_out else ""
        return f"{words}; with {pinned_version('vllm')} and {pinned_version('transformers')}" if self.vllm else words

    # ------------------------------------------------------------------ its parts

    def _secret_values(self, spec: ReplicaSpec) -> dict[str, str]:
        values = {name: os.environ.get(name, "") for name in self.names(spec)}
        if values.get("HF_TOKEN") == "":
            values["HF_TOKEN"] = self.hub.token
        if missing := [name for name, value in values.items() if not value]:
            raise ExecutorError(
                f"the secret {', '.join(missing)} is named but not set in this environment. Next: "
                f"`export {missing[0]}=…`, or remove it from the secrets"
            )
        return values

    @property
    def downloads(self) -> bool:
        """Whether a job downloads its packages; it does not if the image has them."""
        return self.code != INSTALLED

    def _uv_command(self, vllm: bool) -> tuple[list[str], list[Any]]:
        """Return the command that downloads the job's packages, and the job's volumes.   vllm: also download vLLM."""
        if not self.downloads:
            return [], []
        run = ["uv", "run", "--no-project", "--python", f"{sys.version_info.major}.{sys.version_info.minor}"]
        run += [word for package in self.pip for word in ("--with", package)]
        if self.code:
            return [*run, "--with", self.code], []
        from huggingface_hub import Volume

        shipment = self._pack_once(vllm)
        with self._lock:
            self._uploaded[vllm] = self._uploaded.get(vllm) or self.hub.upload(BUCKET, shipment)
        volume = Volume(type="bucket", source=self._uploaded[vllm], mount_path=MOUNT, read_only=True)
        return [*run, "--with-requirements", f"{MOUNT}/{shipment.digest}/requirements.txt"], [volume]

    def _pack_once(self, vllm: bool) -> Shipment:
        if vllm not in self._shipments:
            self._shipments[vllm] = pack_code(MOUNT, self.packages, vllm=vllm)
        return self._shipments[vllm]

"""Checks the options of Slurm and SkyPilot with their own clients; a missing client is reported.

    slurm   submitit's names for sbatch's options · the partition, as sinfo lists it
    sky     the arguments of sky.Resources: returns SkyPilot's error if SkyPilot rejects them

Not promised: accounts, QOS and limits of a site; whether a cloud has such a machine.
"""

import inspect
import subprocess
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from executors.platforms.places import Place
from executors.preflight.mistyped import nearest_hint
from inner.printable import first_line

ASK_S = 5.0
SLURM_OWN = ("folder", "cluster", "usd_per_hour", "timeout_s")  # arguments of SlurmExecutor
SKY_OWN = ("setup", "usd_per_hour", "packages", "pip", "vllm")
OURS = ("time", "job_name", "gres")  # SlurmExecutor sets these from --timeout, the slot and --gpu


def options_fault(place: Place) -> str:
    if place.executor == "slurm":
        return slurm_fault(place.options, slurm_partitions)
    return sky_fault(place) if place.executor == "sky" else ""


def unknown_option(key: str, known: Iterable[str], what: str) -> str:
    known = sorted(known)
    return f"--option {key}: {what} has no such option{nearest_hint(key, known) or '; it has ' + ', '.join(known)}"


# -------------------------------------------------------------------- Slurm


def slurm_fault(options: Mapping[str, Any], ask: Any) -> str:
    """Return the fault of Slurm's options, or "".   ask(): returns the cluster's partitions; None if unknown."""
    known = submitit_names()
    if known is None:
        return ""  # the executor itself reports that submitit is missing
    for key in options:
        if key not in known and key not in SLURM_OWN:
            unknown = unknown_option(key, {*known, *SLURM_OWN}, "sbatch through submitit")
            return f"{unknown} (others: additional_parameters)"
        if key in OURS:
            return f"--option {key}: diloco sets this itself. Use --timeout for the time and --gpu for the GPU"
    wanted = options.get("partition")
    if wanted is None or options.get("cluster", "slurm") != "slurm" or (there := ask()) is None:
        return ""
    for name in str(wanted).split(","):
        if name not in there:
            known = f"{nearest_hint(name, there)}; there are {', '.join(sorted(there))} (sinfo -o %R)"
            return f"--option partition={wanted}: this cluster has no partition {name!r}{known}"
    return ""


def submitit_names() -> frozenset[str] | None:
    """Return submitit's names of sbatch's options; None without submitit."""
    try:
        slurm = import_module("submitit").SlurmExecutor
    except ImportError:
        return None
    return frozenset(slurm._valid_parameters())


def slurm_partitions() -> frozenset[str] | None:
    """Return the partitions of this cluster; None if sinfo does not list them."""
    try:
        listed = subprocess.run(["sinfo", "-h", "-o", "%R"], capture_output=True, text=True, check=True, timeout=ASK_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return frozenset(listed.stdout.split()) or None


# -------------------------------------------------------------------- SkyPilot


def sky_fault(place: Place) -> str:
    try:
        resources = import_module("sky").Resources
    except ImportError:
        return (
            "SkyPilot is not installed here, so no replica could start, and --gpu and --option were not checked. "
            "Next: pip install 'serverless-diloco[sky]', then `sky check`"
        )
    given = {key: value for key, value in place.options.items() if key not in SKY_OWN}
    known = [name for name in inspect.signature(resources).parameters if not name.startswith("_")]
    for key in given:
        if key not in known:
            return unknown_option(key, {*known, *SKY_OWN}, "sky.Resources")
    for gpu in place.gpu or (None,):
        try:
            resources(accelerators=gpu, **given)
        except Exception as error:  # errors of SkyPilot's own kinds, which differ from release to release
            words = " ".join(f"{key}={value}" for key, value in given.items())
            first = first_line(error)
            return (
                f"SkyPilot does not take --gpu {gpu or '(none)'} {words}: {first}. `sky show-gpus` lists what there is"
            )
    return ""

"""Finds places that cannot run [inner.vllm], and makes notes on unchecked facts.

    vllm_missing    vLLM is not installed, a place has no GPU, or --pip names a package that excludes vLLM

A function that finds faults returns a sentence, or "" if it finds none.

Not promised: that the GPU is large enough.
"""

from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from diloco.run.config import RunConfig
from executors.platforms import FAR
from executors.platforms.packages.versions import pinned_version, vllm_requirements
from executors.platforms.places import Place
from executors.preflight.needs.task_packages import named_packages
from inner.settings.vllm import INSTALL, has_vllm


def notes_about_vllm(place: Place) -> Iterator[str]:
    if "code" in place.options:
        yield f"not checked: that {place.options['code']} brings vLLM; without it a job ends before its replica starts"
    else:
        versions = f"{pinned_version('vllm')}, {pinned_version('transformers')}"
        yield f"replicas on {place.executor} get the second set of versions ({versions}), unlike this machine"


def vllm_missing(config: RunConfig, place: Place) -> str:
    """Return a fault if vLLM would be missing.  We install vLLM's GPU build in a platform's environment, but we do not
    change the environment of this machine."""
    if config.inner.vllm is None:
        return ""
    if place.executor not in FAR:
        if has_vllm():
            return ""
        return (
            "inner.vllm: vLLM is not installed here, where replicas run. It needs other versions than this environment "
            f"({pinned_version('vllm')}, {pinned_version('transformers')}, {pinned_version('huggingface-hub')}). Run "
            f"`{INSTALL}` in a new environment, and start the run from there. Or leave [inner.vllm] out"
        )
    if not place.gpu and not place.options.get("hardware") and not place.options.get("accelerators"):
        return (
            f"inner.vllm: replicas on {place.executor} would have no GPU, and the build of vLLM that they get needs a "
            "GPU. Add --gpu, or leave [inner.vllm] out"
        )
    return _vllm_conflict(place)


def _vllm_conflict(place: Place) -> str:
    """Return a fault if --pip names a package at a version that vLLM's versions exclude."""
    for text in named_packages(place):
        try:
            need = Requirement(text)
        except InvalidRequirement:  # a URL or a file: pip checks it
            continue
        pin = next((p for p in vllm_requirements() if p.startswith(f"{canonicalize_name(need.name)}==")), "")
        if pin and not need.specifier.contains(pin.partition("==")[2], prereleases=True):
            return (
                f"inner.vllm: --pip {text} on {place.executor} conflicts with vLLM, which is installed with {pin}. "
                "Name the package without a version, or leave [inner.vllm] out"
            )
    return ""

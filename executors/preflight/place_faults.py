"""Finds mistakes in the chosen places, from config, places, environment and the packages of this machine.

    devices_fault   several devices for a replica that cannot use them (needs/gpu_faults.py)
    launcher_fault  torchrun has started this command, so its replicas would count as its processes
    proc_fault      /proc is missing, so processes of this machine cannot be told apart
    vllm_missing    [inner.vllm] in a place without vLLM or a GPU, … (needs/vllm_faults.py)
    few_bits        bitsandbytes will be missing for inner.optimizer = "adamw8bit" or inner.lora.base = "nf4"
    liger_missing   liger-kernel will be missing for inner.trl.use_liger_kernel
    task_fault      a package that scores the run's task is on no index (needs/task_packages.py)
    keys_missing    s3://, hf://, a run key: no secret is named for places that do not get this environment
    plain_secret    a token or a password in a place's env or options
    model_far       the model is a folder of this machine, and another machine publishes it
    image_fault     a text that is not an image's name
    options_fault   options of sbatch and SkyPilot (platform_options.py)

Each function returns a sentence about a mistake, or "".

Not promised: checks of the contents of a Modal secret or an image; notes name them.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from diloco.run.config import RunConfig
from executors.platforms import FAR
from executors.platforms.places import Place
from executors.preflight.needs.task_packages import is_installed, named_packages, task_fault
from executors.preflight.needs.vllm_faults import notes_about_vllm, vllm_missing
from executors.preflight.platform_options import options_fault
from inner.models.naming import is_gguf_file
from inner.settings.inner import InnerError
from rendezvous.machine import start_ticks
from rendezvous.stores.run_key import KEY

AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
SECRET_NAME = re.compile(r"SECRET|(^|_)TOKEN$|PASSW|API_?KEY|PRIVATE_?KEY|RUN_KEY|CREDENTIAL", re.I)
SECRET_VALUE = re.compile(r"(hf_|sk-|ghp_|github_pat_|xox[bp]-|wandb_)\w{12,}")
VARIABLE = r"(\$\{\w+\}|\$[A-Z_][A-Z0-9_]*)"
NEEDED = {"s3": AWS, "hf": AWS}  # scheme of the run -> variables that its store reads from the environment
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
REFERENCE = re.compile(r"[a-z0-9][\w.-]*(:\d+)?(/[\w.-]+)*(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", re.ASCII)


def place_faults(
    config: RunConfig,
    url: str,
    places: Sequence[Place],
    environ: Mapping[str, str] = os.environ,
    *,
    is_new: bool = True,
) -> Iterator[str]:
    """Yield the mistakes, one sentence each; the cheapest checks come first.   is_new: the model is not published."""
    several = len({place.executor for place in places}) > 1
    for place in places:
        found = (
            devices_fault(config, place, places), launcher_fault(place, environ), proc_fault(place), image_fault(place),
            vllm_missing(config, place), few_bits(config, place), liger_missing(config, place),
            task_fault(config, place),
            keys_missing(url, place, environ, several=several), plain_secret(place), options_fault(place),
        )  # fmt: skip
        yield from (fault for fault in found if fault)
    if is_new and (fault := model_far(config, places)):
        yield fault


def notes_about(
    config: RunConfig, url: str, places: Sequence[Place], environ: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Yield notes about facts that cannot be checked from here, and about GPUs that are too small."""
    for place in places:
        if place.executor == "modal" and place.secrets and (names := _needed_variables(url, environ)):
            yield f"not checked: that the Modal secret {' or '.join(place.secrets)} holds {', '.join(names)}"
        if image := place.options.get("image"):
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            has = f"Python {version} and uv" if place.executor == "hf-jobs" else "what a GPU needs"
            yield f"not checked: the image {image}, which must have {has}; our code is added to it"
        if config.inner.vllm is not None and place.executor in FAR:
            yield from notes_about_vllm(place)
    far = sorted({p.executor for p in places if p.executor in FAR})
    endpoint = next((n for n in ENDPOINTS if environ.get(n)), "")
    if far and endpoint and url.startswith("s3://") and not any(endpoint in (*p.secrets, *p.env) for p in places):
        yield f"not checked: {endpoint} is set here; replicas on {', '.join(far)} need it too, or {url}?endpoint=…"

    if any(place.gpu for place in places):
        from executors.preflight.needs.gpu_faults import notes_about_memory

        yield from notes_about_memory(config, places)


def devices_fault(config: RunConfig, place: Place, places: Sequence[Place]) -> str:
    if not place.gpu and place.devices == 1:
        return ""
    from executors.preflight.needs.gpu_faults import idle_devices, ranks_fault, unequal_devices

    has_actors = any(one.actors for one in places)
    return unequal_devices(place) or idle_devices(place) or ranks_fault(config, place, has_actors=has_actors)


def launcher_fault(place: Place, environ: Mapping[str, str]) -> str:
    if place.executor in FAR or place.actors or (size := environ.get("WORLD_SIZE") or "1") == "1":
        return ""
    return (
        f"WORLD_SIZE = {size} is set here, as a launcher does, and replicas on {place.executor} inherit it: each would "
        "refuse to be one of several processes. Unset it, or start this command once, without torchrun"
    )


def proc_fault(place: Place) -> str:
    if place.executor != "local" or start_ticks(os.getpid()) is not None:
        return ""
    return (
        "/proc is not mounted here (or `ps` is missing), so this machine's processes cannot be told apart and no "
        "replica would start. Mount it: `mount -t proc proc /proc`"
    )


# -------------------------------------------------------------------- installed packages


def few_bits(config: RunConfig, place: Place) -> str:
    """Return a fault if bitsandbytes is needed and would be missing.  An image gets the packages of `--pip`, and the
    project's packages that are installed on this machine."""
    user = bitsandbytes_user(config)
    return _absent("bitsandbytes", *user, place) if user else ""


def liger_missing(config: RunConfig, place: Place) -> str:
    is_used = bool(config.inner.trl.get("use_liger_kernel"))
    return _absent("liger-kernel", "inner.trl.use_liger_kernel = true", "leave it out", place) if is_used else ""


def _absent(package: str, setting: str, instead: str, place: Place) -> str:
    if place.executor in FAR:
        if may_bring(place, package):
            return ""
        where, next_ = f"will not be in the image on {place.executor}", f"Add `--pip {package}`"
    else:
        if importlib.util.find_spec(package.replace("-", "_")) is not None:
            return ""
        where, next_ = "is not installed here, where replicas run", f"`pip install {package}`"
    return f"{setting}, and {package} {where}. {next_}, or {instead}."


def bitsandbytes_user(config: RunConfig) -> tuple[str, str] | None:
    """Return the setting that needs bitsandbytes, and an alternative; None if no setting needs it."""
    if config.inner.optimizer == "adamw8bit":
        without = 'set inner.optimizer = "adamw" (AdamW\'s moments of an adapter are small anyway)'
        return 'inner.optimizer = "adamw8bit"', without
    if config.inner.lora is not None and config.inner.lora.base is not None:
        return f'inner.lora.base = "{config.inner.lora.base}"', "leave base out, for a base in inner.dtype"
    return None


def about_missing(package: str, spelling: str, refused: str, places: Sequence[Place]) -> str:
    """Return a note on a package that the user's code imports and this machine lacks.

    Raise InnerError if replicas lack it, too: an image has only packages installed here and packages of an option.
    """
    brings = lambda p: p.executor in FAR and (may_bring(p, package) or _named_elsewhere(p))  # noqa: E731
    without = next((p for p in places if not brings(p)), None)
    if without is None:
        return f"not checked: {spelling}, since {package} is not installed here (the image must have it)"
    where = "here" if without.executor not in FAR else f"here, and so not in the image on {without.executor}"
    raise InnerError(
        f"{refused.partition('  next:')[0].rstrip()}\n  {package} is not installed {where}.\n  next: `pip install "
        f"{package}` (a module of your own, like {package}.py, is sent if it is beside the code)."
    )


def _named_elsewhere(place: Place) -> bool:
    """Whether `--pip` names a package that is not installed here: it may contain modules of any name (cv2, sklearn)."""
    return not all(map(is_installed, named_packages(place)))


def may_bring(place: Place, package: str) -> bool:
    named = " ".join(str(place.options.get(key, "")) for key in ("pip", "packages", "setup")).replace("_", "-")
    return package.replace("_", "-") in named or any(key in place.options for key in ("image", "code"))


def about_sandbox(spelling: str, refused: str, places: Sequence[Place]) -> list[str]:
    """Return notes for code that runs programs in bubblewrap.   refused: why this machine cannot, or "".

    Raise InnerError for a place that surely cannot run it: this machine, or an image without bubblewrap.
    """
    far = [place for place in places if place.executor in FAR]
    if refused and len(far) < len(places):
        raise InnerError(refused)
    for place in far:
        brings = "setup" if place.executor == "sky" else "image"
        if "bubblewrap" not in str(place.options.get("setup", "")) and "image" not in place.options:
            mend = {"setup": "'sudo apt-get install -y bubblewrap'", "image": "NAME of one that has it"}[brings]
            raise InnerError(
                f"{spelling} runs programs in bubblewrap, and replicas on {place.executor} would have none.\n"
                f"  next: --option {place.executor}.{brings}={mend} (docs/feature-deletion.md)."
            )
    names = sorted({place.executor for place in far})
    return [f"not checked: that {name} lets replicas make user namespaces, as bubblewrap does" for name in names]


def image_fault(place: Place) -> str:
    image = place.options.get("image")
    if isinstance(image, str) and REFERENCE.fullmatch(image) is None:
        return (
            f"--option image={image} is not an image's name in a registry; such a name looks like "
            "docker.io/me/image:tag. An image that is only on this machine cannot be reached"
        )
    return ""


# -------------------------------------------------------------------- secrets


def _has_credential(value: object) -> bool:
    """Whether a text has a token or an address's password.  A variable's name or an image's digest does not count."""
    return bool(re.search(rf"//[^/@\s]*:(?!{VARIABLE}@)[^/@\s]+@(?!sha\d+:)|\b{SECRET_VALUE.pattern}", str(value)))


def plain_secret(place: Place) -> str:
    """Return a fault if a variable looks like a secret: control records contain places, so the bucket would show it."""
    if option := next((key for key, value in place.options.items() if key != "env" and _has_credential(value)), ""):
        return (
            f"--{option} of {place.executor} has a token or a password in its text, and the bucket, the job and this "
            "terminal show it in plain. Publish the package, or put it into an image (--option image=NAME)"
        )
    own = place.options.get("env", {})
    named = {**place.env, **(own if isinstance(own, Mapping) else {})}
    found = [name for name, value in named.items() if SECRET_NAME.search(name) or _has_credential(value)]
    if not found:
        return ""
    return (
        f"env of {place.executor} has {found[0]}, which looks like a secret, and the bucket keeps it in plain. Name it "
        f"with --secret {found[0]} instead, and `export` its value here (Modal: make a secret of it)"
    )


def keys_missing(url: str, place: Place, environ: Mapping[str, str], *, several: bool = False) -> str:
    """Return a fault if no secret is named for the store's keys.  On Modal any secret counts, because its name does not
    tell which variables it holds; elsewhere a secret is the name of a variable.

    several: the run has several places, so options name the place: --secret PLACE.NAME.
    """
    whose = f"{place.executor}." if several else ""
    needed = _needed_variables(url, environ)
    if place.executor not in FAR or not needed:
        return ""
    if place.executor == "modal":
        if place.secrets or set(needed) <= set(place.env):
            return ""
        values = " ".join(f'{name}="${name}"' for name in needed)
        return (
            f"replicas on modal need {', '.join(needed)} to take part in {url.partition('?')[0]}, and no secret is "
            f"named. Next: `modal secret create diloco {values}`, then add --secret {whose}diloco"
        )
    missing = [n for n in needed if n not in place.secrets and n not in place.env]
    if not missing:
        return ""
    why = "the run key is set here" if missing == [KEY] else f"they write to {url.partition('?')[0]}"
    options = " ".join(f"--secret {whose}{name}" for name in missing)
    names = ", ".join(missing)
    return f"replicas on {place.executor} need {names} ({why}), and see nothing of this environment: add {options}"


def _needed_variables(url: str, environ: Mapping[str, str]) -> list[str]:
    """Return the variables that a replica elsewhere needs to take part."""
    keys = list(NEEDED.get(url.partition("://")[0], ()))
    temporary = ["AWS_SESSION_TOKEN"] if keys and environ.get("AWS_SESSION_TOKEN") else []
    return [*keys, *temporary, *([KEY] if environ.get(KEY) else [])]


# -------------------------------------------------------------------- the model


def model_far(config: RunConfig, places: Sequence[Place]) -> str:
    """Return a fault if the model is only on this machine, and the first place, which publishes it, is elsewhere."""
    model = config.inner.model
    if places and places[0].executor in FAR and (Path(model).is_dir() or is_gguf_file(model)):
        kind = "file" if is_gguf_file(model) else "folder"
        return (
            f"inner.model = {model!r} is a {kind} of this machine, and the start model is published from "
            f"{places[0].executor}, which cannot see it. Upload it (`hf upload NAME {model}`) and give "
            "its name, or let the first --place be local"
        )
    return ""

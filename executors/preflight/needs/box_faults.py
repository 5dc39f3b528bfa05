"""Checks that replicas will have the package and the keys of the provider of boxes (sandboxes for tools and tests).

    inner.sampling.boxes = "e2b"     this machine      a package here, its keys in this environment or in a file
                                     a rented machine  a package that its image will have, keys as --secret

The first mistake is an InnerError that names the provider; a fact that cannot be checked from here is a note.

Not promised: that the provider accepts the keys, or has free boxes: a replica learns that at its first box.  We do not
see a flavor in the user's environment file: `diloco costs` then reports an unknown price (box_costs.py).
"""

import importlib.util
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.run.config import RunConfig
from executors.platforms import FAR
from executors.platforms.places import Place
from executors.preflight.place_faults import about_sandbox, may_bring
from executors.preflight.run_url import UsageError
from executors.supervision.money.budget import Budget
from inner.errors import InnerError
from inner.settings.inner import InnerConfig
from inner.settings.task import SamplingSettings
from inner.tasks.harbor import BUILDERS, HF_ONLINE, HarborTask, build_fault, in_order, local_fault, read_tasks
from inner.tasks.spec import HARBOR, PRICED


@dataclass(frozen=True)
class Needs:
    """A provider's package and credentials.   keys: environment variables.   file: below home, replaces keys."""

    package: str
    keys: tuple[str, ...] = ()
    file: str = ""


NEEDS = {
    "e2b": Needs("e2b", ("E2B_API_KEY",)),
    "modal": Needs("modal", ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"), ".modal.toml"),
    "hf": Needs("huggingface_hub", ("HF_TOKEN",), ".cache/huggingface/token"),
}


def check_boxes(provider: str, places: Sequence[Place], environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return notes about boxes of this provider at these places.   Raises InnerError for the first mistake."""
    told = f'inner.sampling.boxes = "{provider}"'
    if provider == "local":
        missing = f"{told} needs `bwrap`, which is not on the PATH. `apt-get install bubblewrap`"
        return about_sandbox(told, "" if shutil.which("bwrap") else missing, places)
    for place in places:
        fault = _far_fault if place.executor in FAR else _near_fault
        if text := fault(NEEDS[provider], place, environ):
            raise InnerError(f"{told}: {text}")
    return list(_notes(NEEDS[provider], places))


def check_tasks(config: RunConfig) -> list[str]:
    """Return notes about a run's Harbor tasks.   Raise InnerError for a task that no box of the provider can hold."""
    inner, task, provider = config.inner, config.inner.data.task or "", config.inner.sampling.boxes or ""
    folder = config.folder / task.removeprefix(f"{HARBOR}:")
    if not task.startswith(f"{HARBOR}:") or not folder.is_dir():
        return []
    tasks = read_tasks(folder, inner.data.task_options)
    for one in tasks:
        for box in (one, one.apart) if one.apart else (one,):
            fault = HF_ONLINE if provider == "hf" and box.offline else ""
            if box.build and provider not in BUILDERS:
                fault = build_fault(provider, box.odd, of_verifier=box is one.apart)
            elif provider == "local":
                fault = local_fault(box.image, (box.folder, *(box.files or ()), *one.artifact_paths))
            if fault:
                raise InnerError(f"the Harbor task {one.name}: {fault}")
    longest = max(one.verifier_s for one in tasks)
    return [*_left_out(tasks), *_builds(config, tasks, folder), *_slow_verifiers(inner, longest)]


def _left_out(tasks: Sequence[HarborTask]) -> Iterator[str]:
    links = [str(path) for one in tasks for path in one.left_out]
    if links:
        more = f" and {len(links) - 3} more" if len(links) > 3 else ""
        yield (
            f"boxes do not get these links of Harbor tasks, as each leads out of its folder, nowhere or in a circle: "
            f"{', '.join(links[:3])}{more}. If a task needs such a link, put the files in its place"
        )


def _builds(config: RunConfig, tasks: Sequence[HarborTask], folder: Path) -> Iterator[str]:
    """Yield a note about images that the provider builds at a task's first box."""
    data, provider = config.inner.data, config.inner.sampling.boxes
    chosen = in_order(tasks, data.task_seed)[: data.task_size]
    if built := {box.build for one in chosen for box in (one, one.apart) if box and box.build}:
        seed = ["--seed", str(data.task_seed)] if data.task_seed else []
        words = [str(folder), *data.task_options.get("without", []), "--size", str(data.task_size), *seed]
        yield (
            f"{provider} builds the images of {len(built):,} Dockerfiles, and the first box that needs an image waits "
            f"until it is built. To build them before the run starts: `python -m inner.extras.boxes.images {provider} "
            f"{shlex.join(words)}`"
        )


def _slow_verifiers(inner: InnerConfig, longest: float) -> Iterator[str]:
    """Yield a note if a batch's verifiers may exceed inner.rewards.timeout_s.   longest: seconds of one verifier."""
    needed = longest * -(-inner.generation_size // inner.sampling.tool_workers)
    if 0 < (inner.rewards.timeout_s or 0) < needed:
        yield (
            f"verifiers may take {longest:g} s each, {inner.generation_size} of them {needed:g} s (inner.sampling."
            f"tool_workers = {inner.sampling.tool_workers}), and inner.rewards.timeout_s = "
            f"{inner.rewards.timeout_s:g} ends a batch's rewards: a slow verdict counts as a failed reward. Raise "
            "timeout_s or tool_workers"
        )


def refuse_unpriced(sampling: SamplingSettings, budget: Budget) -> None:
    """Raise UsageError if a budget in dollars cannot include the boxes, because their price is unknown."""
    known = sampling.boxes in PRICED or sampling.box_usd_per_hour is not None
    if budget.max_usd and not known and not budget.allow_unknown_price:
        raise UsageError(
            f"max_usd = {budget.max_usd:g} cannot count boxes of {sampling.boxes}, because no price is known. Set "
            "inner.sampling.box_usd_per_hour to the price of one box, or add --allow-unknown-price"
        )


def _near_fault(needs: Needs, place: Place, environ: Mapping[str, str]) -> str:
    if importlib.util.find_spec(needs.package) is None:
        return f"the package {needs.package} is not installed here. `pip install {needs.package}`"
    missing = [key for key in needs.keys if not environ.get(key)]
    if not missing or (needs.file and (Path.home() / needs.file).is_file()):
        return ""
    return f"{missing[0]} is not set, so there are no credentials. `export {missing[0]}=…`"


def _far_fault(needs: Needs, place: Place, environ: Mapping[str, str]) -> str:
    if importlib.util.find_spec(needs.package) is None and not may_bring(place, needs.package):
        return (
            f"the package {needs.package} is not installed here, and so not in the image on {place.executor}. "
            f"`pip install {needs.package}`"
        )
    missing = [key for key in needs.keys if key not in place.secrets and key not in place.env]
    if not missing or (place.executor == "modal" and place.secrets):
        return ""
    return (
        f"replicas on {place.executor} need {missing[0]}, and see nothing of this environment. Add "
        f"`--secret {missing[0]}`" + (" (a Modal secret that holds it)" if place.executor == "modal" else "")
    )


def _notes(needs: Needs, places: Sequence[Place]) -> Iterator[str]:
    for place in places:
        if place.executor == "modal" and place.secrets and needs.keys:
            yield f"not checked: that the Modal secret {' or '.join(place.secrets)} holds {', '.join(needs.keys)}"

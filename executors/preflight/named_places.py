"""Works out the places of a request: the places that it names, or the run's earlier places with new settings.

    --executor --place ─▶ names ┐
    the run's places before     ┴─▶ + --gpu --secret --timeout --pip --option ─▶ places

Not promised: that a platform knows an option; `build_executor` checks that.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from executors.platforms import EXECUTORS, FAR
from executors.platforms.places import Place, places_of
from executors.preflight.run_url import UsageError
from rendezvous.records.schema import from_json

if TYPE_CHECKING:
    from executors.preflight.quote import PlaceRequest

OF_THE_PLACE = {"modal": ("gpu", "secrets", "timeout_s"), "hf-jobs": ("hardware", "secrets", "timeout_s", "env")}


def refined_places(request: "PlaceRequest", before: Sequence[Mapping[str, Any]]) -> tuple[Place, ...]:
    """Return the places of the request.   before: the run's earlier places, used if the request names none."""
    replicas = [place for place in before if not place.get("actors")]
    actors = request.actors if request.actors is not None else tuple(p for p in places_of(before) if p.actors)
    named = (*_named_places(request, replicas), *actors)
    _check_words(request, named)
    return tuple(_refined_place(place, request) for place in named)


def _named_places(request: "PlaceRequest", before: Sequence[Mapping[str, Any]]) -> tuple[Place, ...]:
    if request.places and request.executor:
        raise UsageError("--executor is for one place, --place for several; use one of them")
    named = request.places or ((Place(request.executor),) if request.executor else places_of(before))
    if request.refines and not (request.places or request.executor or before):
        options = "--gpu, --secret, --timeout, --pip, --option and --no-lease"
        raise UsageError(f"{options} need a place: add --executor NAME")
    return named


def _check_words(request: "PlaceRequest", named: Sequence[Place]) -> None:
    """Raise UsageError if an option names an unknown executor, or an executor that no place has."""
    _check_pip(request.pip, named)
    there = {p.executor for p in named}
    if unknown := there.difference(EXECUTORS):
        raise UsageError(f"there is no executor {min(unknown)!r}; there are {', '.join(EXECUTORS)}")
    said = [("option", key, "." in key) for key, _ in request.options]
    said += [("secret", name, name.partition(".")[0] in EXECUTORS) for name in request.secrets]
    for what, name, is_for_one in said:
        if is_for_one and name.partition(".")[0] not in there:
            raise UsageError(f"--{what} {name}: none of the places is {name.partition('.')[0]!r}")


def _check_pip(packages: Sequence[str], places: Sequence[Place]) -> None:
    if packages and not any(p.executor in FAR for p in places):
        raise UsageError(
            f"--pip is for images that are built ({', '.join(FAR)}); replicas on {places[0].executor} use the Python "
            f"that is here: `pip install {shlex.join(packages)}`"
        )


def _refined_place(place: Place, request: "PlaceRequest") -> Place:
    """Return a place with the request's options.  "modal.region=eu" is an option only for modal.

    Secrets, environment and time limit become fields of the place, even if they were given as options.
    """
    options = dict(place.options)
    for key, value in request.options:
        whose, dot, rest = key.partition(".")
        if not dot or whose == place.executor:
            options[rest if dot else key] = value
    if request.pip and place.executor in FAR:
        options["pip"] = list(request.pip)
    own = {key: options.pop(key) for key in OF_THE_PLACE.get(place.executor, ()) if key in options}
    try:
        refined = {
            "gpu": list(place.gpu or request.gpu or _words(own.get("gpu", own.get("hardware", ())))),
            "timeout_s": request.timeout_s or place.timeout_s or own.get("timeout_s", 0.0),
            "secrets": list(_secrets_of(place, request.secrets) or (*place.secrets, *_words(own.get("secrets", ())))),
            "env": {**place.env, **own.get("env", {})},
            "options": options,
            "lease": place.lease and not request.no_lease,
        }
        return from_json(Place, {**place.to_dict(), **refined})
    except (TypeError, ValueError) as error:
        given = "".join(f", --option {key}={value}" for key, value in {**own, **options}.items())
        raise UsageError(f"{place.executor} cannot have these settings (--timeout{given}): {error}") from error


def _secrets_of(place: Place, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of `--secret` for this place: "modal.aws" is only for modal, "aws" for every place."""
    pairs = [(name, *name.partition(".")) for name in names]
    return tuple(
        rest if dot and whose == place.executor else name
        for name, whose, dot, rest in pairs
        if not dot or whose == place.executor or whose not in EXECUTORS
    )


def _words(value: Any) -> tuple[str, ...]:
    """Return a list, or a text with commas, as a tuple."""
    return tuple(value.split(",")) if isinstance(value, str) else tuple(value)

"""Checks on your machine, before you create or pay for a run, whether a config can run in its places.

    config + its files ─▶ inner/usercode/check.py   every line parses, the code compiles     no torch
    places, options    ─▶ place_faults.py     devices, vLLM, secrets, images, options        no torch
    inner.model        ─▶ inner/models/known.py          a folder, the cache, or one request to the Hub   no torch
    reward, …          ─▶ rehearsal.py        tried in a separate process, 8 s at most
    template, adapter … ─▶ inner/train/dry_run.py  a replica's start without weights, if the model is here

    the first mistake ──▶ UsageError: file, line or key, what was seen, the next thing to do
    a fact that cannot be checked here ──▶ a note: "not checked: …"

Not promised: that a run which passes trains well; that a platform has a free machine.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.run.config import RunConfig
from executors.platforms import FAR
from executors.platforms.places import Place
from executors.preflight.run_url import UsageError
from inner.models.naming import NOT_CHECKED, KnownModel, is_gguf_file
from inner.settings.inner import BUILT_IN_MODELS, InnerConfig, InnerError


@dataclass(frozen=True)
class Checked:
    """The result.   notes: unchecked facts.

    unreached: the model's name, if this machine must publish the model but could not reach it; else "".
    """

    notes: tuple[str, ...] = ()
    unreached: str = ""


def preflight(config: RunConfig, name: str, url: str, places: Sequence[Place]) -> Checked:
    """Check a config in its places.   name: the config file's name.   url: the run's URL, or "".

    Raise UsageError for the first mistake.
    """
    if config.log.to:
        from executors.preflight.needs.tracker_faults import check_trackers

        check_trackers(config.log.to, name)
    try:
        doubts = _check_files(config)
        unchecked = check_places(config, name, url, places)
        known = _known_model(config.inner)
        if known.folder is not None and config.inner.loop != "supervised" and config.inner.data.source is not None:
            from inner.data.template_fault import refuse_missing_template

            refuse_missing_template(config.inner, config.user_files(), known.folder)
        notes = list[str]()
        if config.inner.own_code:
            from executors.preflight.rehearsal import rehearsal_notes

            notes = rehearsal_notes(config, places)
        notes += _dry_run(config, known)
    except InnerError as error:
        raise UsageError(f"{name}: {_with_inner(str(error))}") from None
    told = tuple(n for n in (known.note, *doubts, *notes, *unchecked) if n)
    published_here = not places or places[0].executor not in FAR
    unreached = config.inner.model if published_here and known.note.startswith(NOT_CHECKED) else ""
    return Checked(told, unreached)


def _check_files(config: RunConfig) -> list[str]:
    """Check the user's files without running them; return warnings.   Raises InnerError."""
    told = ""
    if config.inner.named_files or config.inner.loop == "supervised":
        from inner.usercode.check import check_data

        told = check_data(config.inner, config.user_files())
    if config.eval is not None:
        from diloco.run.data_files import check_held_out

        told += f"\n{check_held_out(config.eval, config.inner, config.user_files())}"
    return told.splitlines()


def check_places(config: RunConfig, name: str, url: str, places: Sequence[Place]) -> list[str]:
    """Check the places; return notes.   Raises UsageError, InnerError.

    For a run on this machine whose places have no options, only boxes, optional packages and torchrun are checked.
    """
    notes = list[str]()
    if config.inner.sampling.boxes is not None:
        from executors.preflight.needs.box_faults import check_boxes, check_tasks

        notes = [*check_boxes(config.inner.sampling.boxes, places), *check_tasks(config)]
    plain, lora = all(place == Place(count=place.count) for place in places), config.inner.lora
    needs = config.inner.optimizer == "adamw8bit" or (lora and lora.base) or "use_liger_kernel" in config.inner.trl
    if plain and config.inner.vllm is None and not needs and "WORLD_SIZE" not in os.environ:
        return notes
    from executors.preflight.place_faults import notes_about, place_faults

    for fault in place_faults(config, url, places):
        raise UsageError(f"{name}: {fault}" if fault.startswith("inner.") else fault)
    return [*notes, *notes_about(config, url, places)]


def _known_model(inner: InnerConfig) -> KnownModel:
    if inner.model in BUILT_IN_MODELS:
        return KnownModel()
    from inner.models.known import known_model

    return known_model(inner)


def _dry_run(config: RunConfig, known: KnownModel) -> list[str]:
    """Try a replica's start without weights; return notes.  Raise InnerError if no replica could train."""
    inner = config.inner
    if inner.loop == "supervised" or inner.model in BUILT_IN_MODELS:
        return []
    from inner.models.known import TOKENIZERS
    from inner.train.dry_run import dry_run

    if known.folder is None or not any((known.folder / name).is_file() for name in TOKENIZERS):
        why = "the run reads it out of the file" if is_gguf_file(inner.model) else "its tokenizer is not here"
        pairs = " and the pairs" if inner.replay.is_used else ""
        return [f"not checked: whether {inner.model}'s chat template renders the prompts{pairs} ({why})"]
    held_out = config.eval.source if config.eval is not None else None
    found = dry_run(inner, config.user_files(), known.folder, held_out)
    if found.refused:
        raise InnerError(found.refused)
    return found.note.splitlines()


def _with_inner(text: str) -> str:
    """Return the text with "inner." before a key: "reward = …" becomes "inner.reward = …"."""
    key, equals, _ = text.partition(" = ")
    return f"inner.{text}" if equals and key.isidentifier() else text

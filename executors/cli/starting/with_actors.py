"""The settings of a run with actors, for `train` and `plan`.

    a new run              its config, with the settings that actors need
    an existing run        its settings stay; refused if these settings have no use for actors

Not promised: that a run which cannot be reached now accepts actors.
"""

from contextlib import suppress

from diloco.run.combinations import prepared_for_actors, refuse_actors
from diloco.run.config import RunConfig
from diloco.run.record import read_run
from executors.preflight.quote import StartRequest
from rendezvous import layout
from rendezvous.errors import StoreError
from rendezvous.stores.open import open_store


def with_actors(config: RunConfig, asked: StartRequest) -> RunConfig:
    """Return the config with the settings that actors need.   Raise ConfigError if the run has no use for actors."""
    prepared = prepared_for_actors(config)
    refuse_actors(prepared)
    if asked.places.actors and asked.url:
        with suppress(StoreError):
            if open_store(asked.url).get(layout.RUN) is not None:
                refuse_actors(read_run(asked.url).config)
    return prepared

"""Open a run, and request the keys of its first look at the same time.

    url ──▶ the cache that was last used for it ──▶ the keys that a look would request first ─┐
            run.json, seal.json, commit 0 ────────────────────────────────────────────────────┴─▶ all at once ──▶ View

A second look at an unchanged run needs no other request: one round trip in all.  A wrong guess does no harm: if the
URL now has another run, some requests were useless.

Not promised: that the run does not change between these answers and the look that reads them.
"""

from dataclasses import dataclass, field

from diloco.run.record import OPENING, Run, decode_run, leads_on, open_under_seal, url_below, with_script
from diloco.runlog.cached_look import likely_keys
from diloco.runlog.scope import Scope
from rendezvous import layout
from rendezvous.store import Store
from rendezvous.stores.ahead import Ahead, Answer, ask_store
from rendezvous.stores.cache import Cache, cache_of, latest_cache
from rendezvous.stores.open import open_store
from rendezvous.stores.run_key import as_sealed


@dataclass(frozen=True)
class View:
    """An open run with its cache.   answers: those to the requests that opened the run."""

    run: Run
    cache: Cache | None
    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])


def open_view(url: str, scope: Scope) -> View:
    """Open the current run of this URL, for a look with `scope`.   Raises ConfigError for a URL without a run."""
    bare = open_store(url, make=False)
    asked = Ahead(bare)
    guess = latest_cache(bare.url)
    asked.ask([*OPENING, layout.commit_key(0), *likely_keys(asked, guess, scope)])
    answers = asked.answers
    if leads_on(bare, asked):
        return open_view(url_below(url), scope)
    records, store = open_under_seal(url, bare, asked)
    run = Run(url, store, with_script(decode_run(url, records.get(layout.RUN) or b""), records))
    cache = cache_of(run.store, run.record.nonce)
    if guess is not None and cache is not None and guess.folder == cache.folder:
        cache = guess  # the files of this cache are already read
    return View(run, cache, _verified_answers(store, bare, answers))


def _verified_answers(store: Store, bare: Store, answers: dict[str, Answer]) -> dict[str, Answer]:
    """Return the answers as `store` gives them: for a sealed run, checked and without tags."""
    if (own := as_sealed(store)) is None:
        return answers
    sealed = own.reading_through(Ahead(bare, answers=answers))
    return {key: ask_store(sealed, key) for key in answers if key != layout.SEAL}

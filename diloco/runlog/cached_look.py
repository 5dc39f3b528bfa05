"""The first look at a run of which a cache has the earlier records (look.py).

Not promised: that the cache is of this run; its newest commit is read again, and if that differs, the cache is cleared.
"""

from dataclasses import replace

from diloco.runlog.look import Found, Look, Owner, ReadSoFar, take_look
from diloco.runlog.scope import Scope
from rendezvous import layout
from rendezvous.stores.ahead import Ahead
from rendezvous.stores.cache import Cache


def likely_keys(ahead: Ahead, cache: Cache | None, scope: Scope) -> list[str]:
    """Return the keys that a first look requests in round 1, if `cache` is of this run.  Sends no request."""
    known = ReadSoFar() if cache is None else known_from_cache(cache)
    if cache is None or known.commits == 0:
        return Look(ahead, scope, ReadSoFar()).first_keys
    newest = layout.commit_key(known.commits - 1)  # read again, to compare it with the cache
    keys = Look(ahead, scope, replace(known, commits=known.commits - 1)).first_keys
    return [key for key in keys if key == newest or cache.get(key) is None]


def look_with_cache(ahead: Ahead, cache: Cache, scope: Scope) -> Found:
    """Take the first look."""
    known = known_from_cache(cache)
    if known.commits == 0:
        return take_look(ahead, scope, known)
    newest = layout.commit_key(known.commits - 1)
    body = cache.take(newest)
    found = take_look(ahead, scope, replace(known, commits=known.commits - 1))
    if body is not None and ahead.get(newest) == body:
        cache.put_back(newest, body)
        return found
    cache.clear()
    ahead.forget()
    return take_look(ahead, scope, ReadSoFar())


def known_from_cache(cache: Cache) -> ReadSoFar:
    """Return the cached run's extent; empty without a cached commit, the only proof that the cache is of this run."""
    commits = max((layout.commit_step(key) for key in cache.keys("commit")), default=-1) + 1
    if commits == 0:
        return ReadSoFar()
    claims = dict[str, int]()
    logs = dict[Owner, int]()
    for key in cache.keys("claim"):
        slot, generation = layout.claim_owner(key)
        claims[slot] = max(generation, claims.get(slot, 0))
    for key in cache.keys("log"):
        if owner := layout.log_owner(key):
            logs[owner] = max(layout.log_number(key) + 1, logs.get(owner, 0))
    return ReadSoFar(commits=commits, claims=claims, logs=logs)

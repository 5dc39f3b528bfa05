"""Prefetch of many small objects of a run at the same time.

    ask(keys) ──▶ up to AT_ONCE GETs at a time ──▶ answers ──get(key)──▶ each answer is returned once
                       └── in the cache: no GET
    get(key) of a key that was not prefetched is a GET of its own, so no result depends on the prefetched keys.

Each answer is returned once, so that a reader who reads a heartbeat twice sees its state at two times.

Not promised: the same time for all answers.  A record that is written meanwhile may be seen or not, as with GETs one
after the other.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, cast

from rendezvous.errors import StoreError
from rendezvous.store import Readable

if TYPE_CHECKING:
    from rendezvous.stores.cache import Cache

AT_ONCE = 96  # requests at a time; at 50 ms each, 1,900 per second.  More requests hardly help one client
Answer = bytes | list[str] | Exception | None  # the answer to a GET, or to a LIST


class Ahead:
    """A read-only store of a run with prefetch.

    cache: a cache of records that never change; None: no cache.   answers: key -> answer, from earlier requests.
    """

    cheap = True  # its readers read prefetched keys, which costs no request

    def __init__(
        self, store: Readable, cache: "Cache | None" = None, *, answers: Mapping[str, Answer] | None = None
    ) -> None:
        self.url = store.url
        self._store = store
        self.cache = cache
        self._answers = dict(answers or {})
        self._given: dict[str, bytes] = {}
        self._threads: ThreadPoolExecutor | None = None

    @property
    def answers(self) -> dict[str, Answer]:
        """The answers that were not returned yet, by key."""
        return dict(self._answers)

    def forget(self) -> None:
        """Forget all answers, to begin a new look at the run."""
        self._answers.clear()
        self._given.clear()

    def ask(self, keys: Iterable[str]) -> None:
        """Send a GET (a LIST if the key ends with "/") now for each key that has no answer yet and is not cached.

        An error is raised later, when its key is read.
        """
        news = [key for key in dict.fromkeys(keys) if key not in self._answers and not self.is_cached(key)]
        if getattr(self._store, "cheap", False) or len(news) < 2:
            self._answers |= {key: ask_store(self._store, key) for key in news}
            return
        self._threads = self._threads or ThreadPoolExecutor(AT_ONCE, "ask")
        self._answers |= zip(news, self._threads.map(partial(ask_store, self._store), news), strict=True)

    def is_there(self, key: str) -> bool:
        """Whether there is an object.  Also True after an error, which `get` then raises.  The answer is kept."""
        self.ask([key])
        return self.is_cached(key) or self._answers[key] is not None

    def refuse_silence(self, keys: Iterable[str]) -> None:
        """Raise the store's error if all of these keys got errors.  Otherwise a search for the last key never ends."""
        answers = [self._answers.get(key) for key in keys if not self.is_cached(key)]
        if answers and isinstance(first := answers[0], StoreError) and all(isinstance(a, StoreError) for a in answers):
            raise first

    def listed(self, prefix: str) -> list[str]:
        """Return the keys of a prefetched LIST; [] without such a LIST.  `list` can still return its answer."""
        shown = self._answers.get(prefix)
        return shown if isinstance(shown, list) else []

    def keep(self, key: str) -> None:
        """Put a record into the cache.  The caller has read and checked it, and it never changes."""
        if self.cache is not None and (body := self._given.pop(key, None)) is not None:
            self.cache.add(key, body)

    def is_cached(self, key: str) -> bool:
        """Whether the cache has this record, which was then read and checked earlier."""
        return self.cache is not None and self.cache.get(key) is not None

    # ------------------------------------------------------------------ as a store

    def get(self, key: str) -> bytes | None:
        if self.cache is not None and (body := self.cache.get(key)) is not None:
            return body
        found = self._answers.pop(key) if key in self._answers else self._store.get(key)
        if isinstance(found, Exception):
            raise found
        body = cast("bytes | None", found)
        if body is not None and self.cache is not None:
            self._given[key] = body
        return body

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        return self._store.get_into(key, out, start)

    def list(self, prefix: str) -> list[str]:
        found = self._answers.pop(prefix) if prefix in self._answers else self._store.list(prefix)
        if isinstance(found, Exception):
            raise found
        return cast("list[str]", found)


def ask_store(store: Readable, key: str) -> Answer:
    """Send a GET, or a LIST for a key that ends with "/".   Return the answer, or the error."""
    try:
        return store.list(key) if key.endswith("/") else store.get(key)
    except Exception as error:
        return error

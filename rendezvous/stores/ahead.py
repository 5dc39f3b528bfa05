"""Many small objects of a run, asked for at the same time.

    ask(keys) ──▶ up to AT_ONCE GETs at a time ──▶ answers ──get(key)──▶ each answer is given once
                       └── in the cache: not asked for
    get(key) of a key that was not asked for is a GET of its own, so no result depends on the keys asked ahead.

An answer is given once, so that a reader of one heartbeat at two times sees two moments.

Not promised: one moment for all answers.  A record that was written meanwhile is seen or not, as with GETs in turn.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, cast

from rendezvous.errors import StoreError
from rendezvous.store import Readable

if TYPE_CHECKING:
    from rendezvous.stores.cache import Cache

AT_ONCE = 96  # more hardly helps one client: at 50 ms each, these are 1,900 requests per second
Answer = bytes | list[str] | Exception | None  # to a GET, or to a LIST


class Ahead:
    """A store to read a run from; it has no verb that writes.

    cache: of records that never change, None for none.   answers: by key, from the requests just before.
    """

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
        """The answers that were not read yet."""
        return dict(self._answers)

    def forget(self) -> None:
        """A new look: what was asked before is asked again."""
        self._answers.clear()
        self._given.clear()

    def ask(self, keys: Iterable[str]) -> None:
        """Get all of them now; list those that end with a "/".  An error is raised when its key is read."""
        news = [key for key in dict.fromkeys(keys) if key not in self._answers and not self.is_cached(key)]
        if getattr(self._store, "cheap", False) or len(news) < 2:
            self._answers |= {key: ask_store(self._store, key) for key in news}
            return
        self._threads = self._threads or ThreadPoolExecutor(AT_ONCE, "ask")
        self._answers |= zip(news, self._threads.map(partial(ask_store, self._store), news), strict=True)

    def is_there(self, key: str) -> bool:
        """Whether there is an object.  True if it cannot be read: `get` raises the error.  Its answer is kept."""
        self.ask([key])
        return self.is_cached(key) or self._answers[key] is not None

    def refuse_silence(self, keys: Iterable[str]) -> None:
        """Raise the store's error if it has answered none of these: a search for an end would go on for ever."""
        answers = [self._answers.get(key) for key in keys if not self.is_cached(key)]
        if answers and isinstance(first := answers[0], StoreError) and all(isinstance(a, StoreError) for a in answers):
            raise first

    def listed(self, prefix: str) -> list[str]:
        """The keys that a LIST has shown, if one was asked for.  Its answer stays to be given."""
        shown = self._answers.get(prefix)
        return shown if isinstance(shown, list) else []

    def keep(self, key: str) -> None:
        """Put a record into the cache: it was read and checked, and never changes."""
        if self.cache is not None and (body := self._given.pop(key, None)) is not None:
            self.cache.add(key, body)

    def is_cached(self, key: str) -> bool:
        """Whether it was read and checked at an earlier look."""
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
    """Ask the store by a GET, or by a LIST for a key that ends with a "/"; -> its answer or its error."""
    try:
        return store.list(key) if key.endswith("/") else store.get(key)
    except Exception as error:
        return error

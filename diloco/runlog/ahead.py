"""Many small objects of a run, asked for at the same time.

    ask(keys) ──▶ up to AT_ONCE GETs at a time ──▶ answers ──get(key)──▶ each answer is given once
                       └── in the cache: not asked for
    get(key) of what was not asked for is a GET of its own, so nobody's result hangs on what was asked ahead.

An answer is given once, so that whoever reads a heartbeat twice sees two moments.

Not promised: one moment for all answers.  Records that were written meanwhile are seen or not, as with GETs in turn.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from diloco.runlog.cache import Cache
from rendezvous.store import Body, Buffer, Store

AT_ONCE = 96  # more hardly helps one client: at 50 ms each, these are 1,900 requests per second


class Ahead:
    """A store to read a run from.   cache: of records that never change, None for none."""

    def __init__(self, store: Store, cache: Cache | None = None) -> None:
        self.url, self._store, self.cache = store.url, store, cache
        self._answers: dict[str, bytes | Exception | None] = {}
        self._listed: dict[str, list[str]] = {}  # answers to LISTs, by prefix
        self._given: dict[str, bytes] = {}
        self._threads: ThreadPoolExecutor | None = None

    def forget(self) -> None:
        """A new look: what was asked before is asked again."""
        self._answers.clear()
        self._listed.clear()
        self._given.clear()

    def ask(self, keys: Iterable[str]) -> None:
        """Get all of them now; list those that end with a "/".  What goes wrong with one is raised when it is read."""
        news = [key for key in dict.fromkeys(keys) if key not in self._answers and not self._is_cached(key)]
        if getattr(self._store, "cheap", False) or len(news) < 2:
            self._answers |= {key: self._answer(key) for key in news}
            return
        self._threads = self._threads or ThreadPoolExecutor(AT_ONCE, "ask")
        self._answers |= zip(news, self._threads.map(self._answer, news), strict=True)

    def is_there(self, key: str) -> bool:
        """Is there an object?  Yes, if it cannot be read: its reader hears that.  Its answer stays to be given."""
        self.ask([key])
        return self._is_cached(key) or self._answers[key] is not None

    def keep(self, key: str) -> None:
        """This record was read, is what it should be, and never changes: it goes into the cache."""
        if self.cache is not None and (body := self._given.pop(key, None)) is not None:
            self.cache.add(key, body)

    def _is_cached(self, key: str) -> bool:
        return self.cache is not None and self.cache.get(key) is not None

    def _answer(self, key: str) -> bytes | Exception | None:
        try:
            if key.endswith("/"):
                self._listed[key] = self._store.list(key)
                return None
            return self._store.get(key)
        except Exception as error:
            return error

    # ------------------------------------------------------------------ as a store

    def get(self, key: str) -> bytes | None:
        if self.cache is not None and (body := self.cache.get(key)) is not None:
            return body
        answer = self._answers.pop(key) if key in self._answers else self._store.get(key)
        if isinstance(answer, Exception):
            raise answer
        if answer is not None and self.cache is not None:
            self._given[key] = answer
        return answer

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        return self._store.get_into(key, out, start)

    def list(self, prefix: str) -> list[str]:
        return self._listed.pop(prefix) if prefix in self._listed else self._store.list(prefix)

    def put(self, key: str, body: Body) -> None:
        raise NotImplementedError(f"{key}: this store is for reading a run")

    def create(self, key: str, body: Buffer) -> None:
        raise NotImplementedError(f"{key}: this store is for reading a run")

    def delete(self, keys: Iterable[str]) -> None:
        raise NotImplementedError("this store is for reading a run")

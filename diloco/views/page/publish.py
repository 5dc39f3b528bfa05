"""Publish a run's page in its bucket, so that a reader of the bucket sees the run in a browser, without a server.

    page/index.html          the live page; fetches the files below
    page/data/{n}.json       chunks of outer steps, written again if they changed
    page/data/head.json      written last, so that all chunks that it names are there

This is the only writer in diloco/views, and it writes only these keys.  They are a view: `put` overwrites them, no
replica and no command reads them, and their loss does no harm to the run (decision 048).

Not promised: that the page is true.  Any writer to the bucket can write another page; a seal does not cover it.
"""

from collections.abc import Mapping

from diloco.views.page.data import version_of
from diloco.views.page.freeze import live_page
from rendezvous import layout
from rendezvous.store import Store

HEAD = "head.json"


class Publisher:
    """A writer of the files that changed since its last write."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._index = live_page(name)
        self._written: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"{self._store.url.partition('?')[0].rstrip('/')}/{layout.PAGE_INDEX}"

    def publish(self, files: Mapping[str, bytes]) -> int:
        """Write changed files. Return how many.   files: name -> body, with head.json."""
        chunks = {layout.page_data_key(name): body for name, body in files.items() if name != HEAD}
        wanted = {layout.PAGE_INDEX: self._index, **chunks, layout.page_data_key(HEAD): files[HEAD]}
        news = {key: body for key, body in wanted.items() if self._written.get(key) != version_of(body)}
        for key, body in news.items():
            self._store.put(key, body)
            self._written[key] = version_of(body)
        return len(news)

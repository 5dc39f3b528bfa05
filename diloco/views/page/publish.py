"""A run's page put beside the run, so that a reader of the bucket sees the run in a browser, with no server.

    page/index.html          the live page; asks for the files beside it
    page/data/{n}.json       chunks of outer steps, again where one has changed
    page/data/head.json      last: it names no chunk that is not there

The only writer in diloco/runlog, and of these keys alone.  They are a view: `put` writes over them, no replica and no
command reads them, and with them only a picture is lost (decision 048).

Not promised: that it is true.  Any writer to the bucket can write another page; a seal does not cover it.
"""

from collections.abc import Mapping

from diloco.views.page.data import version_of
from diloco.views.page.freeze import live_page
from rendezvous import layout
from rendezvous.store import Store

HEAD = "head.json"


class Publisher:
    """Writes what has changed since it last wrote."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._index = live_page(name)
        self._written: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"{self._store.url.partition('?')[0].rstrip('/')}/{layout.PAGE_INDEX}"

    def publish(self, files: Mapping[str, bytes]) -> int:
        """files: as a page asks for them, head.json among them.   -> how many objects were written."""
        chunks = {layout.page_data_key(name): body for name, body in files.items() if name != HEAD}
        wanted = {layout.PAGE_INDEX: self._index, **chunks, layout.page_data_key(HEAD): files[HEAD]}
        news = {key: body for key, body in wanted.items() if self._written.get(key) != version_of(body)}
        for key, body in news.items():
            self._store.put(key, body)
            self._written[key] = version_of(body)
        return len(news)

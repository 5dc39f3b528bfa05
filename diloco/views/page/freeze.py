"""Make the page as one file: the frozen report with its data, or the live page, which fetches its data.

    assets/page.html   {styles} {scripts} {data}           page.css · vendor/uPlot · words, source, curves, …, page
      └─▶ frozen    data inlined; opens from disk; makes no request
      └─▶ live      fetches data/head.json, data/{n}.json: of a server (cli/web/server.py) or of the run's bucket:

    page/index.html          the live page; fetches the files below
    page/data/{n}.json       chunks of outer steps, written again if they changed
    page/data/head.json      written last, so that all chunks that it names are there

A content security policy names the digests of the page's own scripts and styles. So no other script runs, for example
from a rollout's text.  Data are in a <script type="application/json">, in which json_bytes leaves no "<".

`Publisher` is the only writer in diloco/views, and it writes only these keys.  These keys are a view: `put` overwrites
them, no replica and no command reads them, and their loss does no harm to the run (decision 048).

Not promised: a page for browsers before 2022; that a published page is true.  Any writer to the bucket can write
another page; a seal does not cover it.
"""

import base64
import errno
import hashlib
import html
import os
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from diloco.views.page.data import json_bytes, version_of
from rendezvous import layout
from rendezvous.store import Store

STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = (
    "vendor/uPlot.iife.min.js", "words.js", "source.js", "steps.js", "curves.js", "lanes.js", "tables.js", "page.js",
)  # fmt: skip
FILE = "report.html"
_BANNER = re.compile(r"\A/\*!.*?\*/\s*", re.S)  # uPlot's short banner; the page has the whole licence


def write_frozen(data: Mapping[str, Any], to: Path) -> Path:
    """Write the page and return its path.   to: a folder, for its report.html, or a file's name with .html.

    Raise FileExistsError for another file of that name."""
    path = to if to.suffix == ".html" and not to.is_dir() else to / FILE
    if path is to and path.exists() and b"diloco</title>" not in path.read_bytes():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(frozen_page(data))
    return path


def frozen_page(data: Mapping[str, Any]) -> bytes:
    """Return the frozen page.   data: the result of page_data, with all chunks."""
    return _page(str(data["head"]["name"]), json_bytes(data), connect="'none'")


def live_page(name: str) -> bytes:
    """Return the page that fetches its data.   name: the run's name, for the title."""
    return _page(name, b"", connect="'self'")


def content_policy(connect: str = "'self'") -> str:
    """Return the policy: only the page's own scripts and styles run, and only its own data are fetched."""
    scripts = " ".join(_digest_of(asset_text(name)) for name in SCRIPTS)
    styles = " ".join(_digest_of(asset_text(name)) for name in STYLES)
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src {connect}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _page(name: str, data: bytes, connect: str) -> bytes:
    parts = {
        "policy": html.escape(content_policy(connect), quote=False),
        "title": html.escape(f"{name} · diloco"),
        "licence": asset_text("vendor/uPlot.LICENSE"),
        "styles": "\n".join(f"<style>{asset_text(style)}</style>" for style in STYLES),
        "scripts": "\n".join(f"<script>{asset_text(script)}</script>" for script in SCRIPTS),
        "data": data.decode("ascii"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], asset_text("page.html")).encode()


@cache
def asset_text(name: str) -> str:
    """Return the text of an asset of this package, as it is in the page."""
    text = files("diloco.views.page").joinpath("assets", *name.split("/")).read_text(encoding="utf-8")
    return _BANNER.sub("", text) if name.startswith("vendor/") else text


def _digest_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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

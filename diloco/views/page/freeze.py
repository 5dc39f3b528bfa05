"""Make the page as one file: the frozen report with its data, or the live page, which fetches its data.

    assets/page.html   {styles} {scripts} {data}           page.css · vendor/uPlot · words, source, curves, …, page
      └─▶ frozen    data inlined; opens from disk; makes no request
      └─▶ live      fetches data/head.json, data/{n}.json: of a server (cli/web/server.py) or a bucket (publish.py)

A content security policy names the digests of the page's own scripts and styles. So no other script runs, for example
from a rollout's text.  Data are in a <script type="application/json">, in which json_bytes leaves no "<".

Not promised: a page for browsers before 2022.
"""

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from diloco.views.page.data import json_bytes

STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = (
    "vendor/uPlot.iife.min.js", "words.js", "source.js", "steps.js", "curves.js", "lanes.js", "tables.js", "page.js",
)  # fmt: skip
FILE = "report.html"
_BANNER = re.compile(r"\A/\*!.*?\*/\s*", re.S)  # of uPlot; the page has its whole licence


def write_frozen(data: Mapping[str, Any], folder: Path) -> Path:
    """Write folder/report.html and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    path.write_bytes(frozen_page(data))
    return path


def frozen_page(data: Mapping[str, Any]) -> bytes:
    """Return the frozen page.   data: of page_data, with all chunks."""
    return _page(str(data["head"]["name"]), json_bytes(data), connect="'none'")


def live_page(name: str) -> bytes:
    """Return the page that fetches its data.   name: of the run, for the title."""
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

"""The built site: every link leads to a file, nothing is fetched from outside, the search has its words.

Where `make docs` has made its environment (.venv/docs); skipped elsewhere.
"""

import json
import os
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.site_pages import ROOT

BUILDER = ROOT / ".venv" / "docs" / "bin" / "mkdocs"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not BUILDER.exists(), reason="make docs")]


class Links(HTMLParser):
    """Collects what a page names.   fetched: what a browser loads by itself.   ids: places in it."""

    def __init__(self) -> None:
        super().__init__()
        self.links, self.fetched, self.ids = list[str](), list[str](), set[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.ids.add(named.get("id", ""))
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        if tag == "link" and named.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.fetched.append(named["href"])
        if tag in ("script", "img", "iframe", "source", "video") and "src" in named:
            self.fetched.append(named["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a network: its proxy is a port without a listener."""
    to = tmp_path_factory.mktemp("built") / "site"
    nowhere = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https", "all")} | {
        "NO_MKDOCS_2_WARNING": "1"
    }
    command = [str(BUILDER), "build", "--strict", "--site-dir", str(to)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **nowhere}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return to


def read_pages(site: Path) -> dict[Path, Links]:
    found = dict[Path, Links]()
    for path in sorted(site.rglob("*.html")):
        found[path] = Links()
        found[path].feed(path.read_text(encoding="utf-8"))
    return found


def test_every_link_of_the_built_site_leads_somewhere_in_it(site: Path) -> None:
    pages = read_pages(site)
    assert len(pages) > 100
    broken = list[tuple[str, str]]()
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in pages[target].ids):
                broken.append((str(path.relative_to(site)), link))
    assert not broken


def test_the_built_site_fetches_nothing_from_outside(site: Path) -> None:
    fetched = {url for page in read_pages(site).values() for url in page.fetched}
    assert fetched and not [url for url in fetched if urlsplit(url).scheme or url.startswith("//")]
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"(@import|url\()\s*[\"']?https?:", styles)


def test_the_search_knows_the_words_of_the_pages_and_leaves_out_the_sources(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {"concepts.html", "faq.html", "reference/api.html"} <= places
    assert not [p for p in places if p.startswith("source/")]
    assert (site / "search" / "search_index.js").is_file(), "from disk it is read as a script"

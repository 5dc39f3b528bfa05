"""Gives every file of the repository that a page links to a page of its own, so that the built site needs no host.

    docs/internals/architecture.md   [layout](../../rendezvous/layout.py)   ──▶   site/source/rendezvous/layout.py.html

mkdocs calls on_files once and on_page_markdown for each page.  A link to nothing stays as it is: `--strict` refuses it.
Not promised: anchors into such a file.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((\.\./[^)#\s]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".txt": "text", ".cfg": "ini", "": "make"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file that is linked to and lies outside docs/, and the site's own script and style."""
    for name in ("iframe-worker.js", "site.css"):
        text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        files.append(File.generated(config, f"assets/{name}", content=text))
    linked = {target for file in files.documentation_pages() for target in linked_sources(file)}
    for target in sorted(linked):
        files.append(File.generated(config, f"source/{target}.md", content=source_page(target)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead such links to those pages."""
    where = page.file.src_uri

    def replaced(match: re.Match[str]) -> str:
        target = source_of(where, match[1])
        return f"]({posixpath.relpath(f'source/{target}.md', posixpath.dirname(where))})" if target else match[0]

    return LINK.sub(replaced, markdown)


def linked_sources(file: File) -> list[str]:
    found = [source_of(file.src_uri, match[1]) for match in LINK.finditer(file.content_string)]
    return [target for target in found if target]


def source_of(page: str, link: str) -> str:
    """The linked path within the repository; "" if it is a page of the documentation, or is not there."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    inside = path.startswith("docs/") or path.startswith("..")
    return "" if inside or not (ROOT / path).exists() else path


def source_page(target: str) -> str:
    """The file's text as a page; of a folder the names in it."""
    path = ROOT / target
    if path.is_dir():
        body = "\n".join(sorted(p.name for p in path.iterdir() if not p.name.startswith(("__pycache__", "."))))
        language = "text"
    else:
        body, language = path.read_text(encoding="utf-8"), LANGUAGES.get(path.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n# {target}\n\n~~~~~~{language}\n{body}\n~~~~~~\n"

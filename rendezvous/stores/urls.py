"""Check of a bucket's URL, which the stores that parse URLs call first.

Not promised: that the bucket exists.
"""


def plain_url(url: str) -> str:
    """Return a bucket's URL unchanged.   Raise ValueError for characters that URL parsers drop without an error.

    Parsers end a URL at "#" and remove tabs and line ends, so two different URLs could mean the same run.
    """
    if bad := next((c for c in url if c == "#" or not c.isprintable()), ""):
        raise ValueError(
            f"this {url.partition(':')[0]}:// URL has {bad!r} in it, which would be dropped with all that follows. "
            "Write the URL without it, e.g. exp-1 for exp#1"
        )
    if url != url.strip():
        raise ValueError(f"this {url.strip().partition(':')[0]}:// URL begins or ends with a blank; remove it")
    return url

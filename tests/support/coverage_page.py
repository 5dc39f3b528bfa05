"""The table of docs/internals/coverage.md from coverage.py's JSON: `make coverage`.

python -m tests.support.coverage_page runs/coverage.json docs/internals/coverage.md
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = """# Coverage

Written by `make coverage`: the fast tests (`make test`) under coverage.py {version}, statements and branches, with the
processes that tests start. A process that a test ends with `kill -9` writes no numbers down, so what only such a one
does counts as not covered; slow tests and tests that need another package's environment are not part of it.

| room | statements | not run | branches | not taken | covered |
|---|---|---|---|---|---|
"""
LOW = """
Files below {low} %:

| file | covered | statements not run |
|---|---|---|
"""
LOWEST = 80


def main(source: Path, page: Path) -> None:
    data = json.loads(source.read_text())
    files = {name: found["summary"] for name, found in data["files"].items()}
    rooms = sorted({name.split("/")[0] for name in files})
    rows = [row(room, (one for name, one in files.items() if name.startswith(f"{room}/"))) for room in rooms]
    low = sorted((one["percent_covered"], name) for name, one in files.items() if one["percent_covered"] < LOWEST)
    below = "".join(f"| `{name}` | {percent:.0f} % | {files[name]['missing_lines']} |\n" for percent, name in low)
    whole = row("**all**", files.values())
    text = HEAD.format(version=data["meta"]["version"]) + "".join(rows) + whole
    page.write_text(text + (LOW.format(low=LOWEST) + below if low else ""))
    print(f"{page}: {data['totals']['percent_covered']:.1f} % of statements and branches")


def row(name: str, found: Iterable[dict[str, Any]]) -> str:
    found = list(found)
    lines, missed, branches, untaken = (
        sum(one[key] for one in found)
        for key in ("num_statements", "missing_lines", "num_branches", "missing_branches")
    )
    share = 100 * (lines + branches - missed - untaken) / (lines + branches)
    return f"| {name} | {lines:,} | {missed:,} | {branches:,} | {untaken:,} | {share:.1f} % |\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

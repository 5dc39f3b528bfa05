"""Run data-juicer over rows, in a process of its own: `python juice.py job.json kept.json`.

    job     {"passes": [["chosen", [{"text_length_filter": {…}}, …]], ["rejected", […]]], "rows": [{"i": 0, …}, …]}
    kept    [{"i": 0, "chosen": …, "rejected": …}, …]      the rows that every pass let through

Filters store a row's statistic under a fixed name and skip what is already there: a second filter on another text would
test the first text again. So the statistics go between two passes.

This file imports nothing of ours: any Python that has data-juicer can run it.

Not promised: speed. Starting data-juicer takes some ten seconds.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def main(job_path: str, kept_path: str) -> None:
    from data_juicer.core.data import NestedDataset  # pyright: ignore[reportMissingImports]
    from data_juicer.utils.constant import Fields  # pyright: ignore[reportMissingImports]

    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = job["rows"]
    for text_key, process in job["passes"]:
        if rows:
            dataset = NestedDataset.from_list(rows).process(
                operators(process, text_key), work_dir=tempfile.mkdtemp(dir=Path(kept_path).parent), open_monitor=False
            )
            rows = [{k: v for k, v in row.items() if k != Fields.stats} for row in dataset]
    Path(kept_path).write_text(json.dumps(rows), encoding="utf-8")


def operators(process: list[dict[str, Any]], text_key: str) -> list[Any]:
    from data_juicer.ops import load_ops  # pyright: ignore[reportMissingImports]

    named = [
        {name: {"text_key": text_key, "skip_op_error": False, **(given or {})}}
        for op in process
        for name, given in op.items()
    ]
    return load_ops(named)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

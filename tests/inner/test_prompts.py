"""Prompts in four formats give the same rows; columns get other names, a system prompt stands in front; bad files."""

import bz2
import csv
import gzip
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict

from diloco.run.config import ConfigError, load_config
from inner import InnerConfig, InnerError
from inner.data.csv_rows import read_csv
from inner.data.faults import answered_words
from inner.data.prompts import load_prompts
from inner.settings.task import DataSettings
from inner.usercode.check import check_data

ROWS = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]
SETTINGS = DataSettings(columns={"question": "prompt"})
WANTED = [{"prompt": row["question"], "answer": row["answer"]} for row in ROWS]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ROWS[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        columns = {name: pyarrow.array([row[name] for row in rows], pyarrow.string()) for name in ROWS[0]}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def read(path: Path, data: DataSettings = SETTINGS, **more: Any) -> list[dict[str, Any]]:
    return load_prompts(path.name, {"prompts": path}, data, **more)


FORMATS = ("jsonl", "json", "csv", "parquet")


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    path = write_rows(tmp_path / f"train.{kind}", ROWS)
    assert read(path) == WANTED
    assert read(path, limit=1) == WANTED[:1]


def test_a_spreadsheets_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("question,answer\nWhat is 0 + 1?,1\n", encoding="utf-8-sig")
    assert read(tmp_path / "train.csv") == WANTED[:1]


def test_messages_survive_parquet(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "Hello"}]
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [prompt], "answer": [7]}), tmp_path / "train.parquet")
    assert read(tmp_path / "train.parquet", DataSettings()) == [{"prompt": prompt, "answer": 7}]


def test_a_system_prompt_stands_in_front(tmp_path: Path) -> None:
    told = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Hello"}
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "Hello"}, {"prompt": [user]}])
    found = read(path, DataSettings(system="Be brief."))
    assert [row["prompt"] for row in found] == [[told, user], [told, user]]
    path = write_rows(tmp_path / "b.jsonl", [{"prompt": [told, user]}])
    with pytest.raises(InnerError, match=r"line 1 begins with a system message of its own, .*Leave one out"):
        read(path, DataSettings(system="Be brief."))


def test_long_fields_of_a_csv(tmp_path: Path) -> None:
    """Python's own limit is 131,072 characters."""
    (tmp_path / "train.csv").write_text(f"prompt,answer\nx,{'y' * 200_000}\n")
    assert read(tmp_path / "train.csv", DataSettings()) == [{"prompt": "x", "answer": "y" * 200_000}]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_column_that_is_not_there_names_those_that_are(tmp_path: Path, kind: str) -> None:
    path = write_rows(tmp_path / f"train.{kind}", ROWS)
    with pytest.raises(
        InnerError, match=r"1 has no column 'task', which inner\.data\.columns renames\. .*'question', 'answer'"
    ):
        read(path, DataSettings(columns={"task": "prompt"}))
    with pytest.raises(InnerError, match=r"1 has no `prompt`.*inner\.data\.columns = \{question"):
        read(path, DataSettings())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"id": 1, "query": "2 + 2?", "text": "t"}, r'inner\.data\.columns = \{query = "prompt"\}\.$'),
        ({"id": 1, "query": ""}, r"\{question = \"prompt\"\}\. It has the columns 'id', 'query'\.$"),
        (
            {"conversations": [{"from": "human", "value": "2 + 2?"}]},
            'as ShareGPT writes them.*before the answer to learn as ."prompt"',
        ),
    ],
    ids=["named", "no question", "sharegpt"],
)
def test_a_row_without_a_prompt_is_told_which_column_it_may_be(tmp_path: Path, row: Any, words: str) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InnerError, match=words):
        read(tmp_path / "train.jsonl", DataSettings())


@pytest.mark.parametrize("end", ["\n", " \n", "\t\n \n", "   "])
@pytest.mark.parametrize("columns", ["prompt", "prompt,answer"])
def test_a_line_of_spaces_is_no_row(tmp_path: Path, columns: str, end: str) -> None:
    (tmp_path / "train.csv").write_text(f"{columns}\n{columns}\n{end}")
    assert read(tmp_path / "train.csv", DataSettings()) == [{name: name for name in columns.split(",")}]


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("prompt,answer,,\nx,y,,\nx,y,,\n", ("", "")), (",prompt,answer\n0,x,y\n1,x,y\n", ("0", "1")),
        (",,prompt,answer\n0,1.0,x,y\n1,2.0,x,y\n", ("0", "1")), (",prompt,answer\n7,x,y\n3,x,y\n", ("7", "3")),
        (",prompt,,answer\n0,x,37,y\n1,x,2,y\n", ("37", "2")),
        (",,prompt,answer\n1.0,no,x,y\n2.0,1,x,y\n", ("no", "1")),
        (",prompt,,answer\n0,x,,y\n1,x,b,y\n", ("", "b")), ("prompt,answer,,\nx,y,,\nx,y,,7\n", ("", "7")),
        ("\n \n,prompt,answer\n0,x,y\n1,x,y\n", ("0", "1")),
    ],
)  # fmt: skip
def test_of_columns_without_a_name_the_one_with_texts_stays(tmp_path: Path, text: str, fields: tuple[str, str]) -> None:
    """Not the empty ones of a spreadsheet, nor the index that pandas writes: it took the place of a numeric answer."""
    (tmp_path / "train.csv").write_text(text)
    assert read(tmp_path / "train.csv", DataSettings()) == [{"": f, "prompt": "x", "answer": "y"} for f in fields]


def test_only_a_csv_with_a_column_without_a_name_is_read_whole_for_its_first_row() -> None:
    """Before: `check` held each row of a large file in memory to look at the first."""

    def lines(header: str) -> Iterator[str]:
        yield from (f"{header}\n", "1,x\n")
        raise EOFError

    assert next(read_csv("a", lines("answer,prompt"))) == ("row 1", {"answer": "1", "prompt": "x"})
    with pytest.raises(EOFError):
        next(read_csv("a", lines(",prompt")))


def test_an_index_that_was_filtered_is_refused_beside_one_that_counts(tmp_path: Path) -> None:
    """Before: it was read as the answers."""
    (tmp_path / "train.csv").write_text(",prompt,\n0,x,0\n5,x,1\n")
    with pytest.raises(InnerError, match=r"row 2 has the field '5' in column 1, .* Name the column in the header"):
        read(tmp_path / "train.csv", DataSettings(columns={"": "answer"}))


@pytest.mark.parametrize("second", ["1,x,7", "1,x,2.5", "1,x,0"])
def test_a_column_without_a_name_that_does_not_count_on_is_refused(tmp_path: Path, second: str) -> None:
    (tmp_path / "train.csv").write_text(f",prompt,\n0,x,0\n{second}\n")
    field = second.rpartition(",")[2]
    with pytest.raises(InnerError, match=rf"row 2 has the field '{field}' in column 3, .* Name the column in the head"):
        read(tmp_path / "train.csv", DataSettings(columns={"": "answer"}))


@pytest.mark.parametrize("text", [",prompt\n4,2+2\n", ",prompt,\n0,2+2,4\n"])
def test_a_column_without_a_name_can_be_renamed(tmp_path: Path, text: str) -> None:
    (tmp_path / "train.csv").write_text(text)
    assert read(tmp_path / "train.csv", DataSettings(columns={"": "answer"})) == [{"answer": "4", "prompt": "2+2"}]


@pytest.mark.parametrize("prompt", ["", "  ", []])
def test_a_prompt_without_a_word_is_refused(tmp_path: Path, prompt: Any) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": prompt}))
    with pytest.raises(InnerError, match="the prompt of line 1 is empty"):
        read(tmp_path / "train.jsonl", DataSettings())


def test_a_chat_without_a_word_is_a_row_whose_environment_writes_the_prompt(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": ""}]}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    assert read(tmp_path / "train.jsonl", DataSettings()) == [row]


@pytest.mark.parametrize("kind", FORMATS)
def test_an_empty_split(tmp_path: Path, kind: str) -> None:
    with pytest.raises(InnerError, match=f"'train.{kind}' is empty"):
        read(write_rows(tmp_path / f"train.{kind}", []))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.xlsx", b"x", r"does not end with \.jsonl, \.json, \.csv, \.parquet"),
        ("a.parquet", b"PAR1 and no more", "is not a Parquet file"),
        ("a.json", b'{"prompt": "x"}', "holds a dict. Write one list of objects"),
        ("a.json", b"[", "is not JSON"),
        ("a.json", b'[{"prompt": "x", "n": 1, "n": 2}]', "an object names 'n' twice"),
        ("a.jsonl", b'{"prompt": [{"role": "user", "content": "x", "content": "y"}]}', "line 1 .*'content' twice"),
        ("a.jsonl", b'{"prompt": "x"}\n[', "line 2 is not JSON"),
        pytest.param("a.jsonl", b'{"deep": ' + b"[" * 10**5, "line 1 is not JSON: .*(recurs|overfl)", id="deep line"),
        pytest.param("a.json", b"[" * 10**5, "is not JSON: .*(recursion|overflow)", id="deep list"),
        ("a.jsonl", b'{"prompt": "caf\xe9"}', r"cannot be read: 'utf-8' codec .* Save it again, as UTF-8"),
        ("a.csv", b"prompt\ncaf\xe9\n", r"cannot be read: 'utf-8' codec .* Save it again, as UTF-8"),
        ("a.csv", b"prompt,answer\n1,2,3\n", r"row 1 has 1 fields more than the header\. Put quotes"),
        ("a.csv", b"prompt,answer,,\nx,y,z,w\n", "row 1 has the field 'w' in column 4, which the header does not name"),
        ("a.csv", b"prompt,answer\n1,2\nWhat is 2+2?\n", r"row 2 has fewer fields than the header\. Complete it"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InnerError, match=words):
        read(tmp_path / name, DataSettings())


def test_a_date_that_python_cannot_hold_is_told(tmp_path: Path) -> None:
    """Before: a traceback, OverflowError."""
    late = pyarrow.array([2**61], pyarrow.int64()).cast(pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"], "at": late}), tmp_path / "a.parquet")
    with pytest.raises(InnerError, match=r"a\.parquet' has a date or a duration that Python cannot hold\. Save"):
        read(tmp_path / "a.parquet", DataSettings())


def test_a_column_that_some_rows_lack_is_none_there_and_told(tmp_path: Path) -> None:
    """Before: refused, where `datasets` fills it."""
    lines = [{"prompt": "x"}, {"prompt": "y", "answer": "z"}, {"prompt": "w", "answer": "v", "anwser": "u"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = read(tmp_path / "a.jsonl", DataSettings())
    assert [(row["answer"], row["anwser"]) for row in rows] == [(None, None), ("z", None), ("v", "u")]
    config = InnerConfig(model="a/b", data={"prompts": "a.jsonl"}, rewards={"function": "r.py:f"})
    (tmp_path / "r.py").write_text("def f(completions, **_): ...\n")
    told = check_data(config, {"prompts": tmp_path / "a.jsonl", "reward": tmp_path / "r.py"})
    assert "of 3 rows, column 'answer' in 2, 'anwser' in 1; the others have None there. Check the spelling" in told


PARQUET = b"PAR1\x15\x04\x15\x0e\x15\x12L"  # the first bytes of a file that pyarrow wrote
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n"


@pytest.mark.parametrize(
    ("first", "rest"),
    [("PAR1,prompt", "1,x"), ("BZh,prompt", "1,x"), ("BZh9,prompt", "1,x"), ("prompt,answer,,", "x,y,,")],
)
def test_a_csv_s_first_words_may_be_any(tmp_path: Path, first: str, rest: str) -> None:
    """Before: refused as Parquet, as bzip2, and as a header that names the column '' twice."""
    (tmp_path / "a.csv").write_text(f"{first}\n{rest}\n")
    assert [row["prompt"] for row in read(tmp_path / "a.csv", DataSettings())] == ["x"]


def test_the_command_that_unpacks_a_file_works_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: without the folder, and without quotes around a name with spaces."""
    path = tmp_path / "my rows" / "it's a.jsonl.gz"
    path.parent.mkdir()
    path.write_bytes(gzip.compress(b'{"prompt": "x"}\n', mtime=0))
    with pytest.raises(InnerError) as refused:
        read(path, DataSettings())
    monkeypatch.chdir(tmp_path)
    command = str(refused.value).partition("Next: `")[2].partition("`, and")[0]
    subprocess.run(command, shell=True, check=True)
    assert read(path.with_suffix(""), DataSettings()) == [{"prompt": "x"}]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"prompt,answer,answer\n1,2,3\n", "the header names the column 'answer' twice"),
        ("a.csv", b"prompt,prompt,answer\n1,2,3\n", "the header names the column 'prompt' twice"),
        (
            "a.jsonl",
            gzip.compress(b'{"prompt": "x"}', mtime=0),
            r"gzip\. Next: `gunzip -c /.*/a\.jsonl > /.*/unpacked-a\.jsonl`",
        ),
        ("a.xlsx", b"PK\x03\x04", r"is a zip archive \(\.xlsx is one, too\)\. .* save the table as \.csv"),
        ("a.jsonl", b"PAR1", r"is a Parquet file\. Name it \.parquet"),
        *(("a.jsonl", bz2.compress(rows), "is compressed by bzip2") for rows in (b"", b"{}")),
        ("a.jsonl", PARQUET, r"is a Parquet file\. Name it \.parquet"),
        ("a.jsonl", b"<!DOCTYPE html>", "is a web page"),
        ("a.jsonl", b"\n<!doctype html>\n<html>", "is a web page"),
        ("a.csv", b"<html lang='en'>", "is a web page"),
        *((f"a.{kind}", LFS, r"is a Git LFS pointer, not the data\. Next: `git lfs pull`") for kind in FORMATS),
        ("a.jsonl", b'[{"prompt": "x"}]', r"line 1 is a list\. .*or name a file that is one list \.json"),
        ("a.jsonl", b'[\n{"prompt": "x"}\n]', r"line 1 is not JSON: .*or name a file that is one list \.json"),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": null}', r"the prompt of line 2 is null\. Write a text"),
        ("a.jsonl", b'{"prompt": "x"}\n\n{"prompt": ""}', r"the prompt of line 3 is empty\. Write a text"),
        ("a.jsonl", b'{"prompt": " \\n"}', r"the prompt of line 1 is empty\. Write a text"),
        ("a.jsonl", b'{"prompt": []}', r"the prompt of line 1 is empty\. Write a text"),
        ("a.jsonl", b'{"prompt": 5}', r"the prompt of line 1 is a number \(5\)\. Write a text"),
        ("a.jsonl", b'{"prompt": {"role": "user"}}', r"the prompt of line 1 is an object\. Put it into a list"),
        ("a.csv", b"prompt,answer\n,5\n", r"the prompt of row 1 is empty\. Write a text"),
        ("a.jsonl", rb'{"prompt": "x \ud83d y"}', r"line 1: the prompt has \\ud83d, half of a character"),
        (
            "a.jsonl",
            rb'{"prompt": [{"role": "user", "content": [{"text": "\udc00"}]}]}',
            r"line 1: .* has \\udc00, half",
        ),
        (
            "a.jsonl",
            rb'{"prompt": [{"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": "\udc00"}}}]}]}',
            r"line 1: .* has \\udc00, half",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said_by_its_own_name(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    """Before: the last of two columns won; a lone surrogate was a TypeError; the others got another fault's advice."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InnerError, match=words):
        read(tmp_path / name, DataSettings())


def test_a_whole_character_beyond_the_first_plane_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(r'{"prompt": "\ud83d\ude00", "answer": "\ud83d"}')
    assert read(tmp_path / "a.jsonl", DataSettings()) == [{"prompt": "😀", "answer": "\ud83d"}]


def test_a_folder_of_data_hears_what_is_in_it(tmp_path: Path) -> None:
    """Before: "there is no file saved"."""
    rows = Dataset.from_list([{"prompt": "x"}])
    rows.save_to_disk(tmp_path / "saved")
    DatasetDict({"test": rows, "train": rows}).save_to_disk(tmp_path / "splits")
    (tmp_path / "files" / "more").mkdir(parents=True)
    for name in ("train.jsonl", "more/test.csv", "README.md"):
        (tmp_path / "files" / name).write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "r.py").write_text("def score(completions, **more):\n    return [0.0] * len(completions)\n")
    for name, words in [
        ("saved", r"load_from_disk\('.*saved'\)\.to_parquet\('saved\.parquet'\)"),
        ("splits", r"load_from_disk\('.*splits'\)\['train'\]\.to_parquet\('splits-train\.parquet'\)"),
        ("files", r"is a folder\. Name a file in it, .* it has more/test\.csv, train\.jsonl"),
        ("empty", r"is a folder\. .* it has no \.jsonl"),
    ]:
        with pytest.raises(InnerError, match=words):
            read(tmp_path / name)
        (tmp_path / "run.toml").write_text(
            f'[fleet]\nreplicas = 1\n[inner]\nmodel = "me/mine"\n[inner.data]\nprompts = "{name}"\n'
            '[inner.rewards]\nfunction = "r.py:score"\n'
        )
        with pytest.raises(ConfigError, match=rf"inner\.data\.prompts: .*{words}"):
            load_config(tmp_path / "run.toml")


def test_prompts_that_end_with_an_answer_are_told() -> None:
    asked, answered = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    told = answered_words("inner.data.prompts", [[asked], [asked, answered], "a text", [answered]])
    assert "2 of 4 prompts end with a message of the assistant, the first: prompt 2" in told
    assert answered_words("inner.data.prompts", [[asked, answered, asked], "a text"]) == ""


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(InnerError, match="gives two columns one name"):
        read(path, DataSettings(columns={"question": "answer"}))


def test_columns_without_prompts_are_refused() -> None:
    with pytest.raises(InnerError, match=r"inner\.data\.system.*inner\.data\.prompts or inner\.data\.task is set"):
        InnerConfig(data=DataSettings(system="Be brief.")).check()


def test_two_columns_of_one_name_in_parquet(tmp_path: Path) -> None:
    """Before: the last of them was read, and nothing was said."""
    columns = [pyarrow.array([text]) for text in "qab"]
    table = pyarrow.table(columns, names=["prompt", "answer", "answer"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InnerError, match="two columns with one name"):
        read(tmp_path / "a.parquet", DataSettings())

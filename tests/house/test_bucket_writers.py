"""The words of reference/operations.md about writers to a bucket: each row of its two tables has tests that can fail.

A row without tests here is red, and so is a test that is not there any more.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.model.fetch import fetch_files
from diloco.run.record import Run, RunRecord
from executors.cli.main import main
from rendezvous import layout
from rendezvous.agreement.membership import read_control, write_control
from rendezvous.errors import Forged
from rendezvous.records.digests import SHA256, digest, hex_of
from rendezvous.records.records import Control
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.run_key import under_key
from tests.support.fakes import ManualClock
from tests.support.puppets import PuppetRun

HERE = "tests/house/test_bucket_writers.py"
SEALED, SEAL = "tests/diloco/test_sealed_overwrites.py", "tests/rendezvous/test_seal.py"
IDENTITY, OWN = "tests/executors/test_identity.py", "tests/diloco/test_own_files.py"
FOREIGN, SLURM = "tests/diloco/test_foreign_objects.py", "tests/executors/test_slurm.py"
EVERY_KIND = f"{SEALED}::test_overwriting_what_lies_there_never_changes_theta_unnoticed"
MONEY = "tests/executors/test_rented.py::test_a_removed_supervisor_log_gives_no_money_back"

WITH_A_KEY = {
    "overwrites your code or a model file": [
        f"{SEALED}::test_no_code_but_the_users_is_ever_written_to_be_imported",
        f"{SEALED}::test_no_model_file_but_the_publishers_is_loaded",
    ],
    "overwrites run.json, the model's manifest": [
        EVERY_KIND, f"{HERE}::test_run_json_with_another_s_code", f"{SEAL}::test_a_forged_commit_ends_the_run_loudly",
        f"{SEAL}::test_a_forged_snapshot_heals_nobody", f"{SEAL}::test_a_forged_mean_is_not_applied",
        f"{SEALED}::test_real_replicas_end_loudly_when_a_manifest_was_overwritten",
        f"{HERE}::test_a_control_record_without_the_key",
    ],
    "overwrites an offer or a claim": [
        EVERY_KIND, f"{SEAL}::test_a_forged_offer_does_not_count_and_does_not_block_the_slot",
        f"{SEAL}::test_a_forged_claim_fences_nobody",
    ],
    "overwrites a delta, a mean or a snapshot": [EVERY_KIND],
    "overwrites a leave record or a residual": [EVERY_KIND, f"{SEAL}::test_a_forged_leave_record_confirms_no_snapshot"],
    "overwrites a later control record": [
        f"{HERE}::test_a_control_record_without_the_key",
        f"{SEAL}::test_an_outsider_can_neither_stop_the_run_nor_close_the_door",
    ],
    "overwrites a beat, or puts an old one back": [
        f"{SEALED}::test_an_old_beat_that_is_put_back_is_silence",
        f"{SEALED}::test_a_forged_beat_neither_fences_nor_drains_nor_stops_nor_lowers_the_quorum",
    ],
    "overwrites or deletes a log": [f"{SEALED}::test_a_forged_log_tells_nothing", MONEY],
    "deletes anything": [
        f"{FOREIGN}::test_a_commit_that_vanished_is_never_written_anew",
        f"{FOREIGN}::test_no_run_is_founded_over_the_registers_of_one_whose_run_json_is_gone",
        f"{FOREIGN}::test_a_session_with_the_number_of_a_lost_claim_ends_by_the_chain_s_fence",
    ],
    "copies true records to other places": [
        EVERY_KIND, f"{SEAL}::test_a_true_offer_is_worth_nothing_in_another_place",
        f"{SEAL}::test_a_record_of_another_run_under_the_same_key_is_worth_nothing",
    ],
    "puts a card, a link or a FIFO into": [
        f"{IDENTITY}::test_no_card_in_the_folder_kills_a_process_or_reads_a_file",
        f"{OWN}::test_a_replica_s_output_goes_nowhere_else", f"{OWN}::test_nothing_is_read_through_it_either",
    ],
    "waits until jobs are queued on Slurm": [f"{SLURM}::test_no_code_lies_in_the_run"],
}  # fmt: skip
WITHOUT = {
    "writes run.json and code of its own": [
        f"{HERE}::test_run_json_with_another_s_code", f"{HERE}::test_what_runs_the_bucket_s_code_here",
    ],
    "writes a model, offers, deltas": [f"{SEALED}::test_without_a_key_a_made_collision_counts"],
    "writes control records": [f"{HERE}::test_a_control_record_without_the_key"],
    "writes beats, leave records or logs": [
        f"{FOREIGN}::test_foreign_objects_and_lines_in_the_log_are_counted_and_passed_over", MONEY,
    ],
    "writes a claim, a log line or a process card": [
        f"{IDENTITY}::test_no_claim_kills_what_is_not_the_run_s",
        f"{IDENTITY}::test_no_card_in_the_folder_kills_a_process_or_reads_a_file",
        f"{IDENTITY}::test_a_log_s_handle_has_types_and_speaks_of_its_own_launch",
        f"{SLURM}::test_a_job_of_another_name_is_not_this_run_s",
        "tests/executors/test_hf_jobs.py::test_a_job_that_a_log_names_and_that_is_another_run_s_is_left_alone",
        "tests/executors/test_modal.py::test_a_call_that_a_log_names_and_that_is_another_run_s_is_left_alone",
        "tests/executors/test_sky.py::test_a_cancellation_waits_for_its_answer",
    ],
    "copies the run, or you do": [f"{IDENTITY}::test_a_copy_of_a_live_run_is_a_run_of_its_own"],
    "waits until you look": [
        f"{HERE}::test_a_reader_runs_no_code_of_the_bucket", f"{SEALED}::test_what_a_log_says_cannot_steer_a_terminal",
        "tests/executors/test_printable.py::test_no_command_prints_it",
        "tests/executors/test_printable.py::test_a_log_is_plain_lines",
        "tests/executors/test_printable.py::test_the_terminal_of_watch_draws_it_plain",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("heading", "tests"), [("## A run key", WITH_A_KEY), ("## Without a run key", WITHOUT)])
def test_each_row_has_its_tests(heading: str, tests: dict[str, list[str]]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "operations.md").read_text(encoding="utf-8")
    table = page[page.index(f"{heading}\n") :].partition("\n## ")[0].splitlines()
    rows = [line.split("|")[1].replace("*", "").strip() for line in table if line.startswith("| ")][1:]
    unmatched = {row: [start for start in tests if row.startswith(start)] for row in rows}
    assert rows and all(len(found) == 1 for found in unmatched.values()), unmatched
    assert len(rows) == len(tests)
    for name in {name for names in tests.values() for name in names}:
        assert name.partition("::")[2] in _tests_in(name.partition("::")[0]), name


def _tests_in(file: str) -> set[str]:
    tree = ast.parse((Path(__file__).parents[2] / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("secret", [b"a key that nobody guesses", None])
def test_run_json_with_another_s_code(tmp_path: Path, secret: bytes | None) -> None:
    """Without a key the writer's code is the run's; under one, the reader of run.json ends."""
    store = under_key(bucket := MemoryStore(), ManualClock(), secret)
    theirs = b"import os"
    key = layout.code_key(hex_of(digest(theirs, SHA256)), "reward.py")
    outer = {"outer": {"codec": "fp32"}}
    record = RunRecord(outer, outer, {"reward": {"key": key, "digest": digest(theirs, SHA256)}}, "n", 0.0)
    bucket.put(key, theirs)
    bucket.put(layout.RUN, record.encode())
    if secret is not None:
        with pytest.raises(Forged):
            store.get(layout.RUN)
    else:
        stands = RunRecord.decode(store.get(layout.RUN) or b"")
        assert fetch_files(Run("memory://", store, stands), tmp_path)["reward"].read_bytes() == theirs


@pytest.mark.parametrize("secret", [b"a key that nobody guesses", None])
def test_a_control_record_without_the_key(secret: bytes | None) -> None:
    store = under_key(bucket := MemoryStore(), ManualClock(), secret)
    write_control(store, ManualClock(), replicas=1, min_replicas=1, steps=9, max_usd=5.0)
    forged = Control(1, "n", 0.0, replicas=64, max_usd=1e6, places=({"executor": "modal"},))
    bucket.put(layout.control_key(1), forged.encode())
    wanted = read_control(store)
    assert (wanted.replicas, wanted.max_usd) == ((1, 5.0) if secret else (64, 1e6))
    bucket.put(layout.control_key(0), forged.encode())
    if secret:
        with pytest.raises(Forged):
            read_control(store)


# -------------------------------------------------------------------- whose code runs here


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PuppetRun:
    made = PuppetRun(tmp_path_factory.mktemp("looked-at"))
    made.rounds(2)
    return made


@pytest.fixture
def code_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Keys of the user's files that are fetched: nothing can run that was not."""
    keys, get = list[str](), FileStore.get

    def noted(self: FileStore, key: str, *more: Any, **named: Any) -> bytes | None:
        keys.extend([key] if key.startswith("code/") else [])
        return get(self, key, *more, **named)

    monkeypatch.setattr(FileStore, "get", noted)
    yield keys


LOOKS = [
    ["status", "RUN"], ["costs", "RUN"], ["report", "RUN"], ["verify", "RUN"], ["explain", "RUN", "--step", "0"],
    ["diff", "RUN", "RUN"], ["export", "RUN", "--to", "OUT/model"], ["logs", "RUN", "r00"], ["logs", "RUN", "r00-1"],
    ["traces", "RUN", "--to", "OUT/traces.jsonl"], ["gc", "RUN", "--keep", "window", "--dry-run"],
    ["stop", "RUN", "--grace", "0"], ["reward", "RUN", "--rollout", "r00/0/0/0.0.0", "--value", "1", "--name", "x"],
]  # fmt: skip


@pytest.mark.parametrize("command", LOOKS, ids=lambda words: "-".join(words[:1]))
def test_a_reader_runs_no_code_of_the_bucket(
    run: PuppetRun, tmp_path: Path, code_read: list[str], command: list[str]
) -> None:
    assert any(run.folder.glob("code/*/*")), "there is something to run"
    words = {"RUN": run.url, "OUT/model": str(tmp_path / "model"), "OUT/traces.jsonl": str(tmp_path / "traces.jsonl")}
    code = main([words.get(word, word) for word in command])
    assert code in (0, 1, 2) and (code_read == [] or command[0] == "verify")  # it compares their SHA-256, in memory


def test_what_runs_the_bucket_s_code_here(run: PuppetRun, tmp_path: Path, code_read: list[str]) -> None:
    """`eval` and `blame` fetch the user's files onto this machine, as replicas do."""
    record = json.loads((run.folder / "run.json").read_text())
    keys = {stored["key"] for stored in record["files"].values()}
    main(["blame", run.url, "--by", "step"])
    assert keys and keys <= set(code_read)

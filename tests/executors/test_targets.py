"""Folders that a command writes into: its own, or none; and commands that are printed to be copied."""

import errno
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from executors.cli.checking.init import init
from executors.cli.failures import explain_error, is_expected
from executors.cli.main import main
from executors.cli.starting.foreground import supervise_here
from executors.cli.writing.exported import MARK, fresh_folder, mark_export, refuse_export, replace_export
from executors.preflight import run_url
from executors.preflight.run_url import UsageError, checked_url, make_folder, refuse_foreign_files
from executors.supervision.notices.messages import full_words
from rendezvous import layout
from rendezvous.errors import StoreFull, StoreGone
from rendezvous.stores.open import open_store
from rendezvous.stores.urls import room_words

ROOT = Path(__file__).parents[2]
CONFIG = 'name = "x"\n[inner]\nloop = "supervised"\nmodel = "tiny"\ndata.text = "text.txt"\n'


def listing(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_a_project_is_not_written_among_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"holds thesis.tex.*diloco init .*first"):
        init(tmp_path, model="me/mine", task="sums")
    assert listing(tmp_path) == ["thesis.tex"]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".git").mkdir()
    assert "run.toml" in init(tmp_path / "new", model="me/mine", task="sums"), "hidden files disturb nothing"


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_a_run_is_not_founded_among_other_files(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("one two three")
    before = listing(tmp_path)
    assert main([verb, str(tmp_path / "run.toml"), "--run", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "holds run.toml, text.txt, which belong to no run" in said and f"--run {tmp_path}/runs/first" in said
    assert listing(tmp_path) == before


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_a_damaged_run_is_no_folder_of_other_files(
    tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: "holds processes, which belong to no run", and the advice to start another run inside this one."""
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("one two three")
    run = tmp_path / "run"
    for name in (layout.claim_key("r00", 1), "processes/r00.log", "notes.md"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    before = listing(run)
    assert main([verb, str(tmp_path / "run.toml"), "--run", str(run)]) == 2
    said = capsys.readouterr().err
    assert "run.json is not there, though replicas/r00/000001.json is. A script with" in said and "restore it" in said
    assert "belong to no run" not in said and listing(run) == before


def test_the_folder_of_a_run_or_of_a_founding_that_was_cut_off_is_its_own(tmp_path: Path) -> None:
    for name in ("code", "report.html"):
        (tmp_path / name).mkdir()
        refuse_foreign_files(str(tmp_path))
    (tmp_path / "notes.md").write_text("x")
    with pytest.raises(UsageError, match=r"notes\.md"):
        make_folder(f"file://{tmp_path}")
    (tmp_path / layout.RUN).write_text("{}")
    refuse_foreign_files(str(tmp_path))


def test_every_folder_of_a_run_is_known_as_its_own() -> None:
    drawn = re.findall(r"^    [├└]── ([\w.]+)", layout.__doc__ or "", re.M)
    assert set(drawn) == set(layout.TOP)


def test_a_model_is_written_over_an_earlier_export_and_nothing_else(tmp_path: Path) -> None:
    refuse_export(tmp_path / "new")
    mine = tmp_path / "mine"
    mine.mkdir()
    refuse_export(mine)
    (mine / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds config.json, which no export has written"):
        refuse_export(mine)
    mark_export(mine, "file:///run", 3)
    refuse_export(mine)
    assert (mine / MARK).is_file()
    (tmp_path / "run" / "control").mkdir(parents=True)
    (tmp_path / "run" / layout.RUN).write_text("{}")
    with pytest.raises(UsageError, match="is inside the run at"):
        refuse_export(tmp_path / "run" / "model")


def test_a_later_export_leaves_no_file_of_the_earlier_one(tmp_path: Path) -> None:
    """Before: an adapter stayed beside the whole model with that adapter in it, and was applied a second time."""
    to = tmp_path / "model"
    for files in (("adapter_config.json", "adapter_model.safetensors", "sub/notes.txt"), ("config.json",)):
        with fresh_folder(to) as made:
            for name in files:
                (made / name).parent.mkdir(exist_ok=True)
                (made / name).write_text(name)
            assert replace_export(to, made, "file:///run", 3) == sorted(files)
        (to / "mine.txt").write_text("mine")
    assert sorted(p.name for p in to.rglob("*") if p.is_file()) == ["config.json", MARK, "mine.txt"]


NO_SPACE = "Error while serializing: I/O error: No space left on device (os error 28)"  # seen with safetensors 0.8


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), SafetensorError(NO_SPACE)])
def test_a_full_disk_is_named_by_the_export_s_folder(tmp_path: Path, error: Exception) -> None:
    """Before: safetensors' error ended `diloco export` with a traceback."""
    with pytest.raises(type(error)) as told, fresh_folder(tmp_path / "to"):
        raise error  # as write() raises the first: without a name
    assert is_expected(told.value)
    assert f"disk for the command's files ({tmp_path / 'to'})" in explain_error(told.value)[0]


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.ESTALE, errno.EIO])
def test_a_file_system_without_an_answer_is_no_mistake_in_the_command(number: int) -> None:
    """Before: "[Errno 107] Transport endpoint is not connected" from each verb, and exit code 2.

    Seen with the real sshfs, whose daemon was killed.
    """
    text, code = explain_error(OSError(number, os.strerror(number), "run/run.json"))
    assert code == 75
    assert text.startswith(f"the file system of run/run.json gives no answer: {os.strerror(number)}. A mount may be")


def test_a_read_only_place_is_told() -> None:
    """Before: "[Errno 30] Read-only file system".  Seen with `--to` on a mounted squashfs."""
    text, code = explain_error(OSError(errno.EROFS, os.strerror(errno.EROFS), "image/out"))
    assert code == 2 and text.startswith("image/out is on a read-only file system. Name")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_limit_of_this_machine_is_no_mistake_in_a_path(number: int) -> None:
    """Before: "run/run.json: Too many open files. Correct this path, or name another one", and exit code 2."""
    text, code = explain_error(OSError(number, os.strerror(number), "run/run.json"))
    assert code == 75 and text.startswith(f"{os.strerror(number)} (run). Raise the limit of this shell (`ulimit -n")


def test_an_error_of_a_path_is_told_without_its_number() -> None:
    """Before: "[Errno 2] No such file or directory: '/proc/x'", after `export --to /proc/x`."""
    told = explain_error(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/proc/x"))
    assert told == ("/proc/x: No such file or directory. Correct this path, or name another one", 2)


def test_an_account_without_a_home_is_told_to_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: Python's traceback, after the run was founded.  Seen with a uid that has no passwd entry."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(RuntimeError) as told:
        Path.home()
    assert is_expected(told.value) and explain_error(told.value)[1] == 2
    assert explain_error(told.value)[0].startswith(f"this account (uid {os.getuid()}) has no home folder")


def test_a_folder_that_is_mounted_again_needs_another_start() -> None:
    """Before: exit code 2, "starting again changes nothing", after a lost mount was mounted again."""
    assert explain_error(StoreGone("the folder leads to another folder"))[1] == 75


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    to = tmp_path / "model"
    with fresh_folder(to) as made:
        (made / "config.json").write_text("old")
        replace_export(to, made, "file:///run", 3)
    with suppress(KeyboardInterrupt), fresh_folder(to) as made:
        (made / "config.json").write_text("new")
        raise KeyboardInterrupt
    assert (to / "config.json").read_text() == "old" and sorted(p.name for p in to.iterdir()) == ["config.json", MARK]
    with suppress(KeyboardInterrupt), fresh_folder(tmp_path / "none"):
        raise KeyboardInterrupt
    assert not (tmp_path / "none").exists()


def test_what_is_printed_to_be_copied_can_be_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my $HOME run's"
    assert main(["init", str(folder), "--model", "me/mine"]) == 0
    cd = next(line.strip() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("cd "))
    assert shlex.split(cd) == ["cd", str(folder)]
    assert main(["status", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"--run {shlex.quote(str(folder))}" in said


def test_no_command_in_the_source_names_a_path_without_quotes() -> None:
    """`diloco VERB {url}` in a text is `{shlex.quote(url)}`."""
    known = r"shlex\.quote|secrets|slot|beside|own\}|run\}|self\.(?:before|after)|lines"  # numbers; quoted before
    command = re.compile(rf"(?:diloco \w+ (?:[A-Z]+ )?|--run |--from |--to )\{{(?!{known})([\w.]+)\}}")
    texts = [(path, path.read_text()) for room in ("diloco", "executors") for path in (ROOT / room).rglob("*.py")]
    found = [f"{path.name}: {m[0]}" for path, text in texts for m in command.finditer(text)]
    assert not found


def test_a_home_that_the_shell_did_not_name_is_no_folder_called_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--run=~/mine`: shells put the home in only at the begin of a word."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checked_url("~/mine") == f"{tmp_path}/mine"


@pytest.mark.parametrize("typed", ["file://localhost{}", "file://LOCALHOST{}", "file://127.0.0.1{}", "file://{}", "{}"])
def test_a_folder_s_url_may_name_this_machine(tmp_path: Path, typed: str) -> None:
    url = checked_url(typed.format(tmp_path / "run"))
    assert open_store(url).url == open_store(typed.format(tmp_path / "run")).url == f"file://{tmp_path}/run"
    assert url.removeprefix("file://").startswith("/"), "others cut off file:// alone"


WRONG = {
    "file://tmp/x": "did you mean file:///tmp/x or tmp/x?",
    "file://localhost": "names this machine, and no folder of it: write file:///the/folder",
    "file://LocalHost/": "names this machine, and no folder of it",
    "file://127.0.0.1": "names this machine, and no folder of it",
    "FILE:///tmp/x": "write it in lower case, file:///tmp/x",
    "S3://k:secret@bucket/x?secret=1": "write it in lower case, s3://bucket/x",
    "Modal://a/b": "write it in lower case, modal://a/b",
}


@pytest.mark.parametrize("url", WRONG)
@pytest.mark.parametrize("verb", ["status", "report", "plan", "train"])
def test_a_url_that_names_no_store_is_answered_with_the_right_spelling(url: str, verb: str, tmp_path, capsys) -> None:
    """Before: file://tmp/x made a folder of that name below this one, and S3:// was told all stores but itself."""
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "text.txt").write_text("words")
    words = [str(tmp_path / "run.toml"), "--run", url] if verb in ("plan", "train") else [url]
    assert main([verb, *words]) == 2
    said = capsys.readouterr().err
    assert WRONG[url] in said and "secret" not in said


@pytest.mark.parametrize("verb", ["status", "report", "verify", "stop", "costs"])
def test_a_folder_whose_name_is_no_text_is_answered(verb: str, tmp_path: Path) -> None:
    """Before: a traceback, UnicodeEncodeError."""
    assert main([verb, os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")]) == 2


def test_a_disk_without_inodes_is_not_told_to_have_no_space(tmp_path: Path, monkeypatch) -> None:
    disk = SimpleNamespace(f_files=10, f_favail=0, f_bavail=1 << 20, f_frsize=4096, f_blocks=1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    assert "no inode left" in full_words(str(tmp_path)) and "no inode left (" not in room_words(tmp_path)
    assert "df -i" in room_words(tmp_path)
    monkeypatch.setattr(tempfile, "mkstemp", lambda **_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(StoreFull, match="the disk has no inode left"):
        open_store(str(tmp_path / "run")).put("run.json", b"{}")
    disk.f_favail = 5
    assert full_words(str(tmp_path)) == "" and "Free some space" in room_words(tmp_path)


def test_another_thread_supervises_nothing(tmp_path: Path) -> None:
    """Before: ValueError, signal only works in main thread, after the slot of the supervisor was claimed."""
    told = list[BaseException]()

    def supervise() -> None:
        try:
            supervise_here(None)  # type: ignore[arg-type]
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=supervise)
    thread.start()
    thread.join()
    assert isinstance(told[0], UsageError) and "main thread" in str(told[0])


@pytest.mark.slow
def test_kernels_that_do_not_compile_say_the_compiler_s_last_words(tmp_path: Path) -> None:
    """Before: "returned non-zero exit status 1" beside "Install a C compiler"."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'first' >&2\necho 'cc: No space left on device' >&2\nexit 1\n")
    compiler.chmod(0o755)
    environ = {**os.environ, "CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = "from rendezvous.codecs import why_no_kernels; print(why_no_kernels())"
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("exit status 1. cc: No space left on device"), done.stdout + done.stderr


def test_a_new_run_below_a_mount_that_is_away_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: `train` created a second run of that name on the disk below, and began at step 0."""
    nas, fstab, mounts = (tmp_path / name for name in ("the nas", "fstab", "mounts"))
    nas.mkdir()
    point = str(nas.resolve()).replace(" ", "\\040")
    rows = ["UUID=1 / ext4 defaults 0 1", "UUID=2 none swap sw 0 0", f"#nas:/y {tmp_path.resolve()} nfs bg 0 0"]
    rows += ["", f"nas:/x {point} nfs bg 0 0"]
    fstab.write_bytes(b"# caf\xe9\n" + "\n".join(rows).encode())
    monkeypatch.setattr(run_url.unmounted_point, "__defaults__", (fstab, mounts))
    refuse_foreign_files(str(nas / "runs/a"))  # a machine without a table of mounts
    mounts.write_text("/dev/sda / ext4 rw 0 0\n")
    with pytest.raises(UsageError, match=r"the nas is not mounted now.*may be on the mount\. Mount it"):
        make_folder(str(nas / "runs/a"))
    refuse_foreign_files(str(tmp_path / "runs/a"))
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nnas:/x {point} nfs rw 0 0\n")
    refuse_foreign_files(str(nas / "runs/a"))

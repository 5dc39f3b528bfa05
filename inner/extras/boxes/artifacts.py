"""Carry an episode's artifacts into the verifier's own box (environment_mode = "separate" of a Harbor task).

    the episode's box ── tar of each path, at most MOST bytes ──▶ read here: regular files below the path
                                                                    │ one tar, made anew
    the verifier's box ◀── remove what is at these paths, unpack ───┘

The first tar comes from a box that a policy has used, so we trust nothing in it: names elsewhere, devices, and links
that lead out of the archive are left out, as Harbor does.

Not promised: that a link stays a link (it becomes a copy of its file); owners; empty folders.
"""

import io
import shlex
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from inner.extras.boxes.box import Box, ProviderFailed
from inner.tasks.harbor_files import placed

MOST = 64 << 20  # bytes of one artifact's tar
LIMIT_S = 120.0
LARGE = 4  # exit code of PACK
PACK = """[ -e {path} ] && f=$(mktemp /tmp/artifact-XXXXXX) || exit 1
tar -C / -cf - {without} -- {name} 2>/dev/null | head -c {most} > "$f"
[ "$(stat -c %s "$f")" -lt {most} ] || {{ rm -f "$f"; exit {large}; }}; echo "$f" """
CLEARED = "{{ [ {is_folder} = True ] && [ -d {path} ] || rm -rf {path}; }} && "  # a file may stand where a folder comes
EMPTIED = "{{ [ ! -d {path} ] || find {path} -mindepth 1 -delete; }} && "
DAMAGE = (tarfile.TarError, ValueError, OverflowError, RecursionError)  # what a forged archive raises
TAR = "/tmp/artifacts.tar"  # in the verifier's box


class Artifacts(NamedTuple):
    """Artifacts outside any box.   tar: an archive of all.   places: replaced path -> whether it is a folder."""

    tar: bytes
    places: dict[str, bool]


def collect(box: Box, artifacts: Sequence[Sequence[str]], tell: Callable[[str], None]) -> Artifacts:
    """Return the artifacts that are in an episode's box; call tell(why) for one too large.   Raises BoxGone."""
    out, places = io.BytesIO(), dict[str, bool]()
    with tarfile.open(fileobj=out, mode="w") as all_of_them:
        for path, *without in artifacts:
            packed = io.BytesIO(_pack(box, path, without, tell))
            with suppress(*DAMAGE), tarfile.open(fileobj=packed, mode="r:") as found:  # "r" would unpack a bomb
                if members := found.getmembers():
                    places[path] = members[0].isdir()
                for member, data in _files_below(found, path):
                    all_of_them.addfile(member, io.BytesIO(data))
    return Artifacts(out.getvalue(), places)


def place(box: Box, artifacts: Artifacts) -> None:
    """Put the artifacts into the verifier's box.   Raises BoxGone, and ProviderFailed if they cannot be unpacked."""
    box.write(TAR, artifacts.tar)
    clear = "".join(
        (CLEARED + EMPTIED).format(path=shlex.quote(path), is_folder=is_folder)
        for path, is_folder in artifacts.places.items()
    )
    ran = box.exec(f"{clear}tar -C / -xf {TAR} && rm -f {TAR}", user="root", timeout_s=LIMIT_S)
    if ran.code:
        raise ProviderFailed(f"the verifier's box could not unpack the artifacts: {ran.output[-200:]!r}.")


def _pack(box: Box, path: str, without: Sequence[str], tell: Callable[[str], None]) -> bytes:
    """Return the bytes of a tar of `path`; b"" if it is absent, or too large."""
    patterns = " ".join(shlex.quote(f"--exclude={pattern}") for pattern in without)
    script = PACK.format(path=shlex.quote(path), name=shlex.quote(path[1:]), without=patterns, most=MOST, large=LARGE)
    ran = box.exec(script, user="root", timeout_s=LIMIT_S)
    if ran.code == LARGE:
        tell(f"the artifact {path} has {MOST >> 20} MiB or more, so the verifier did not get it.")
    place = ran.output.strip()
    try:
        packed = box.read(place) if ran.code == 0 and place.startswith("/tmp/artifact-") else b""
    except FileNotFoundError:  # a process of the episode removed it
        packed = b""
    if packed:
        box.exec(f"rm -f {shlex.quote(place)}", user="root", timeout_s=LIMIT_S)
    return packed


def _files_below(archive: tarfile.TarFile, path: str) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield a new member and its content for each file at `path` or below, until MOST bytes."""
    left = MOST
    for member in archive:
        name = placed("/", member.name)
        if not f"{name}/".startswith(f"{path}/"):
            continue
        try:
            content = archive.extractfile(member)
            data = b"" if content is None else content.read(left + 1)
        except (KeyError, *DAMAGE):  # a link out of the archive, or in a circle
            continue
        if content is None or (left := left - len(data)) < 0:
            continue
        made = tarfile.TarInfo(name[1:])
        made.size, made.mode = len(data), 0o755 if member.mode & 0o111 and member.isreg() else 0o644
        yield made, data

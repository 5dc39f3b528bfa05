"""The files of AWS's own tools, and the advice on how to give keys.

    environment ──▶ obstore reads it      ~/.aws/credentials ──▶ credentials_from_file, if the environment has no keys
    a refusal, and a file newer than this process ──▶ the file counts more than the environment

Not promised: profiles that need a command or a browser (export their keys).
"""

import configparser
import os
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from obstore.store import S3Credential

_refusals = 0
_began = time.time()


def note_refusal() -> None:
    """Note that a store has refused a request, so that a newer file counts."""
    global _refusals
    _refusals += 1


def aws_file(kind: str) -> Path:
    """Return the path of a file of AWS's own tools.   kind: SHARED_CREDENTIALS or CONFIG."""
    named = os.environ.get(f"AWS_{kind}_FILE")
    return Path(named or os.path.expanduser("~/.aws/" + ("config" if kind == "CONFIG" else "credentials")))


def file_counts() -> bool:
    """Whether to use the credentials file.

    Keys in the environment come first, unless a request was refused and the file is newer than this process.
    """
    try:
        written = aws_file("SHARED_CREDENTIALS").stat().st_mtime
    except OSError:
        return False
    in_environment = os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE")
    return (not in_environment or (_refusals > 0 and written > _began)) and bool(_read_profile())


def _read_profile() -> dict[str, str]:
    found = profile_in(aws_file("SHARED_CREDENTIALS"))
    return found if "aws_access_key_id" in found and "aws_secret_access_key" in found else {}


def profile_in(path: Path) -> dict[str, str]:
    """Return the settings of AWS_PROFILE in this file; {} without them."""
    file = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error, OSError, UnicodeError):
        file.read(path)
    name = os.environ.get("AWS_PROFILE") or "default"
    section = f"profile {name}" if f"profile {name}" in file else name
    return dict(file[section]) if section in file else {}


def credentials_from_file() -> "S3Credential":
    """Return the file's keys.  obstore calls this again 10 s later: it replaces keys that expire within 5 minutes."""
    profile = _read_profile()
    return {
        "access_key_id": profile.get("aws_access_key_id", ""),
        "secret_access_key": profile.get("aws_secret_access_key", ""),
        "token": profile.get("aws_session_token"),
        "expires_at": datetime.now(UTC) + timedelta(minutes=5, seconds=10),
    }


def keys_of(scheme: str) -> str:
    if scheme == "gs":
        return (
            "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default login`; "
            "the role is Storage Object User"
        )
    if scheme == "az":
        return "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN)"
    whose = "S3 keys of your Hugging Face namespace" if scheme == "hf" else "`aws sts get-caller-identity` shows whose"
    return (
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN) or write ~/.aws/credentials "
        f"({whose}); they need to get, put, delete and list there"
    )

"""The second block of examples/mixed_fleet/README.md, as it stands: Modal, Hugging Face and this machine in one run.

The real clients and the `modal` command against servers on loopback; containers have neither this project nor its
environment, and a stub of NVIDIA's driver.  Only BUCKET and the dots are filled in.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import read_report
from diloco.runlog.summary import checks
from rendezvous.stores.open import open_store
from tests.support.hf_server import HFServer
from tests.support.modal_fixtures import KEYS
from tests.support.modal_server import ModalPlatform
from tests.support.modal_venv import stub_driver, venv_of
from tests.support.s3_server import S3Server

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """(the block, the run's URL)"""
    for name in [n for n in os.environ if n.startswith(("AWS_", "DILOCO_"))]:
        monkeypatch.delenv(name)
    python = str(venv_of(None, tmp_path / "venv", with_gpu=True))
    with S3Server(access_key=KEYS["AWS_ACCESS_KEY_ID"]) as s3, HFServer(python=python) as hub, ModalPlatform():
        hub.plain = {"LD_LIBRARY_PATH": str(stub_driver(tmp_path / "driver"))}
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_TOKEN", hub.token)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        url = f"s3://bucket/mixed?endpoint={s3.endpoint}"
        text = (ROOT / "examples" / "mixed_fleet" / "README.md").read_text()
        block = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)[1].replace("s3://BUCKET/mixed", url)
        yield re.sub(r"(\w+)=…", lambda found: f"{found[1]}={KEYS[found[1]]}", block), url


def run_lines(script: str, *verbs: str) -> subprocess.CompletedProcess[str]:
    """The block, with those of its commands that begin so, and all that is no `diloco`."""
    commands = script.replace("\\\n", " ").splitlines()
    kept = [c for c in commands if not c.startswith("diloco") or c.startswith(tuple(f"diloco {v}" for v in verbs))]
    return subprocess.run(
        ["bash", "-ec", "\n".join(kept)], cwd=ROOT, capture_output=True, text=True, timeout=580, env=dict(os.environ)
    )


def test_the_plan_of_three_platforms_passes_as_it_is_typed(script: tuple[str, str]) -> None:
    """Before: pre-flight refused the README's own command, with advice that no two platforms could follow."""
    done = run_lines(script[0], "plan")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was started" in done.stdout and "r02: a job of tester on t4-small" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_platforms_are_one_run_as_it_is_typed(script: tuple[str, str]) -> None:
    done = run_lines(script[0], "plan", "train")
    assert done.returncode == exitcodes.DONE, done.stdout[-3000:] + done.stderr[-3000:]
    report = read_report(open_store(script[1]))
    assert report.done and all(c.ok for c in checks(report)), checks(report)
    places = {e["slot"]: e["executor"] for e in report.of_kind("launched") if e["slot"] != "publish"}
    assert places == {"r00": "modal", "r01": "modal", "r02": "hf-jobs", "r03": "local"}
    assert {slot for step in report.steps for slot in step.fresh} == set(places)

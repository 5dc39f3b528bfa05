"""Every command block of the documentation that is marked runnable runs, in a new folder, as it stands on its page.

The Hub is a stand-in on loopback that has a tiny model under the name that the pages use; all else is as a reader has
it.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from executors.cli.checking.init import MODEL
from inner.settings.inner import InnerConfig
from inner.train.build import publish_model
from tests.support.hf_models import HubModels
from tests.support.site_pages import DOCS, Commands, all_pages, bucket_drawing, key_shapes, runnable

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
MARKED = {page.relative_to(DOCS).as_posix(): runnable(page) for page in all_pages() if DOCS in page.parents}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The surroundings of the commands: our `diloco` first, a Hub on loopback, a cache and a home of their own."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "model").mkdir()
    (folder / "a.txt").write_text("a")
    publish_model(InnerConfig(loop="supervised", model="tiny", data={"text": "a.txt"}), folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    with HubModels({MODEL: folder / "model"}) as hub:
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "DILOCO_"))}
        yield {**kept, **own, "PATH": path, "TOKENIZERS_PARALLELISM": "false"}


def run_blocks(blocks: list[Commands], folder: Path, environment: dict[str, str]) -> str:
    """One shell for the blocks of a page, so that `cd` holds."""
    script = "set -e\n" + "\n".join(block.text for block in blocks)
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def test_the_pages_for_newcomers_have_commands_that_run() -> None:
    assert len(MARKED["start.md"]) >= 7


@pytest.mark.parametrize("page", [p for p, blocks in MARKED.items() if any(not b.slow for b in blocks)])
def test_the_short_commands_of_a_page_run(page: str, tmp_path: Path, environment: dict[str, str]) -> None:
    run_blocks([block for block in MARKED[page] if not block.slow], tmp_path, environment)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [p for p, blocks in MARKED.items() if any(b.slow for b in blocks)])
def test_all_commands_of_a_page_run(page: str, tmp_path: Path, environment: dict[str, str]) -> None:
    run_blocks(MARKED[page], tmp_path, environment)
    if page == "start.md":
        assert (tmp_path / "mine/runs/first/report.html").stat().st_size > 10_000
        written = key_shapes(tmp_path / "mine/runs/first")
        assert written <= bucket_drawing()
        elsewhere = {"seal.json", "residuals/{}-{}-{}.bin", "page/index.html", "page/data/{}.json"}
        elsewhere |= {"weights/{}/manifest.json", "weights/{}/{}-{}.bin", "script.json"}  # of other kinds of runs
        elsewhere |= {"rollouts/{}/{}/{}.{}.bundle", "rollouts/{}/{}/{}.{}.verdict"}
        elsewhere |= {"rollouts/{}/{}/{}.{}.{}.{}.reward"}
        assert bucket_drawing() - written <= {*elsewhere, "alive/{}.json"}
        assert (tmp_path / "mine/my-model/model.safetensors").is_file()
        assert (tmp_path / "own/runs/own/report.html").is_file()

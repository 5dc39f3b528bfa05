"""`--again` where a run lies on Modal, and where its records are sealed: the same promises as in a folder."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.run import record
from diloco.run.config import load_config
from diloco.run.founding import open_run
from diloco.run.record import Superseded, read_run
from executors.cli.starting import again
from executors.preflight.run_url import UsageError
from rendezvous import layout
from rendezvous.agreement.membership import read_control
from rendezvous.clock import SystemClock
from rendezvous.engine.rendezvous import Commit
from rendezvous.errors import Forged, WrongRun
from rendezvous.records.records import WireError
from rendezvous.store import put_once
from rendezvous.stores.open import open_store
from rendezvous.stores.run_key import KEY, open_signed
from rendezvous.stores.signed import SignedStore
from tests.executors.test_again import founded as founded_in_a_folder
from tests.executors.test_again import mended
from tests.executors.test_cli import complaint, config, run, say  # noqa: F401  (fixtures)

CLOCK = SystemClock()
SECRET = "a key of sixteen characters"


@pytest.fixture(scope="module")
def on_modal() -> Iterator[str]:
    pytest.importorskip("modal")
    from tests.support.modal_server import ModalPlatform

    with ModalPlatform():
        yield "modal://runs"


@pytest.fixture(params=["folder, sealed", "modal", "modal, sealed"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if "sealed" in request.param:
        monkeypatch.setenv(KEY, SECRET)
    if "modal" in request.param:
        return f"{request.getfixturevalue('on_modal')}/{tmp_path.name}"
    return str(tmp_path / "mine")


def found_again(config: Path, url: str) -> str:  # noqa: F811
    return again.found_again(load_config(config), url, CLOCK, lambda text: None, grace_s=0.0)


@pytest.mark.quick(2)
def test_the_mended_file_is_founded_under_the_same_name_everywhere(capsys, config, url):  # noqa: F811
    open_run(load_config(config), url, CLOCK)
    with pytest.raises(WrongRun, match="Nothing was trained there yet: the same command with --again"):
        open_run(load_config(mended(config)), url, CLOCK)
    assert found_again(config, url) == f"{url}/again" == record.current_url(url)
    open_run(load_config(config), record.current_url(url), CLOCK)
    spelled = set[str]()
    for verb in ("status", "costs"):  # `costs` alone spelled a folder as it was typed
        code, out, err = say(capsys, verb, url, "--json")
        assert code == 0, out + err
        spelled.add(json.loads(out)["url"])
    assert spelled == {open_store(f"{url}/again").url}
    (config.parent / "text.txt").write_text("mended twice")
    assert found_again(config, record.current_url(url)) == f"{url}/again/again" == record.current_url(url)


@pytest.mark.quick(1)
def test_a_sleeper_of_the_first_founding_can_commit_nowhere(config, run, url):  # noqa: F811
    commit = run.store.get(layout.commit_key(0))
    open_run(load_config(config), url, CLOCK)
    found_again(mended(config), url)
    won, stands = put_once(store := open_signed(url), CLOCK, layout.commit_key(0), commit)
    assert not won and record.is_superseded(store)
    with pytest.raises(WireError, match="found a superseded"):
        Commit.decode(stands)


def test_a_run_that_took_a_step_is_not_founded_again_anywhere(config, run, url):  # noqa: F811
    founded = open_run(load_config(config), url, CLOCK)
    founded.store.create(layout.commit_key(0), run.store.get(layout.commit_key(0)))
    with pytest.raises(UsageError, match="has taken a step with another config"):
        found_again(mended(config), url)
    assert record.current_url(url) == url


# -------------------------------------------------------------------- under a run key


def test_the_new_run_is_sealed_with_an_identity_of_its_own(config, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv(KEY, SECRET)
    url = founded_in_a_folder(config)
    open_run(load_config(mended(config)), new := found_again(config, url), CLOCK)
    seals = [open_store(u).get(layout.SEAL) for u in (url, new)]
    assert None not in seals and seals[0] != seals[1]
    assert isinstance(read_run(new).store, SignedStore)


def test_a_user_without_the_key_founds_nothing_again_and_hears_why(capsys, config, monkeypatch):  # noqa: F811
    monkeypatch.setenv(KEY, SECRET)
    url = founded_in_a_folder(config)
    monkeypatch.delenv(KEY)
    with pytest.raises(WrongRun, match=f"under a run key, and {KEY} is not set here"):
        found_again(mended(config), url)
    assert not record.is_superseded(open_store(url))
    monkeypatch.setenv(KEY, SECRET)
    open_run(load_config(config), found_again(config, url), CLOCK)
    monkeypatch.delenv(KEY)
    for verb in ("status", "resume"):
        assert f"{KEY} is not set here" in complaint(capsys, verb, url)


def forged(config, monkeypatch) -> str:  # noqa: F811
    monkeypatch.setenv(KEY, SECRET)
    url = founded_in_a_folder(config)
    open_store(url).put(layout.commit_key(0), Superseded("n", 0.0).encode())
    return url


@pytest.mark.parametrize("verb", ["status", "resume", "train"])
def test_a_forged_superseded_leads_nobody_away_from_a_sealed_run(capsys, config, monkeypatch, verb):  # noqa: F811
    """Before: `train`, the command that also resumes, founded another run at RUN/again, and began to pay for it."""
    url = forged(config, monkeypatch)
    argv = (verb, config, "--run", url) if verb == "train" else (verb, url)
    assert "was not written with this run's key" in complaint(capsys, *argv)
    assert open_store(f"{url}/again").get(layout.RUN) is None and record.current_url(url) == url
    with pytest.raises(Forged):
        found_again(mended(config), url)


def test_nor_does_it_keep_anybody_from_ending_a_sealed_run(capsys, config, monkeypatch):  # noqa: F811
    """Before: "there is no run at RUN/again", and the fleet of RUN went on."""
    url = forged(config, monkeypatch)
    code, out, err = say(capsys, "stop", url)
    assert code == 0, out + err
    assert read_control(open_signed(url)).stop

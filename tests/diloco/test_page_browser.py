"""The page in a real Chromium: nothing overflows, nothing complains, nothing of a run's texts runs, keys read it.

Opt-in: slow, and skipped where no Chromium is installed.  AXE=path/to/axe.min.js looks for barriers, too.
"""

import os
from pathlib import Path

import pytest

from diloco.runlog.reader import read_report
from diloco.views.page.freeze import write_frozen
from executors.cli.looking.report import whole_page
from executors.cli.web import server as web
from executors.cli.web.run import PageLooks
from rendezvous import layout
from rendezvous.errors import StoreUnclear
from tests.diloco.test_report import T0, FixedClock
from tests.executors.test_web import view_of
from tests.support.chromium import Chromium, require_chromium
from tests.support.fakes import Fault, FaultyStore
from tests.support.page_runs import busy_run

pytestmark = pytest.mark.slow
SIZES = [(12, 3), (1000, 3), (12, 64), (300, 64), (1000, 32)]


@pytest.fixture(scope="module")
def browser():
    require_chromium()
    with Chromium() as made:
        yield made


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[tuple[int, int], Path]:
    """The frozen page of a run of each size."""
    found = dict[tuple[int, int], Path]()
    for steps, replicas in SIZES:
        run = busy_run(steps, replicas)
        data = whole_page(read_report(run.store), run.store, T0 + 1e5)
        found[steps, replicas] = write_frozen(data, tmp_path_factory.mktemp(f"{steps}x{replicas}"))
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_no_overflow_no_complaint_nothing_asked(browser, pages, size, width: int, dark: bool) -> None:
    with browser.open(pages[size].as_uri(), width=width, dark=dark) as tab:
        assert tab.wait_until_drawn() == str(size[0])
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("document.title").startswith("gsm8k-"), "no script of a rollout ran"
        assert tab.evaluate("document.querySelectorAll('.u-wrap canvas').length") >= 10
        assert tab.evaluate("document.body.innerText.includes('[object')") is False
        tab.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        tab.wait_for("document.querySelectorAll('table').length >= 5")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, "with everything opened"
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
        assert [url for url in tab.asked if not url.startswith(("file:", "data:"))] == [] and tab.errors == []


def test_charts_and_the_grid_are_read_with_the_keyboard(browser, pages) -> None:
    with browser.open(pages[12, 3].as_uri()) as tab:
        tab.wait_until_drawn()
        tab.evaluate("document.querySelector('#charts .plot').focus()")
        tab.press("Home")
        assert tab.evaluate("document.querySelector('#charts .read').textContent").startswith("step 0 · ")
        tab.press("ArrowRight")
        assert "step 1 · " in tab.evaluate("document.querySelector('#charts .read').textContent")
        tab.evaluate("document.querySelector('.map').focus()")
        for key in ("ArrowRight", "Home", "ArrowDown"):
            tab.press(key)
        words = tab.evaluate("document.querySelector('#grid .read').textContent")
        assert words.startswith("step 0, closed by ") and words.endswith("r01: counted")


def test_every_line_of_a_chart_is_named_in_its_colour(browser, pages) -> None:
    """Before: no word said which bytes are up and which down; the key named a band that few replicas do not have."""
    for size, named in (((12, 3), "■ r00 ■ r01 ■ r02 ■ mean "), ((12, 64), "")):
        with browser.open(pages[size].as_uri()) as tab:
            tab.wait_until_drawn()
            words = tab.evaluate("[...document.querySelectorAll('.charts .read')].map((one) => one.textContent)")
            assert words[0] == named and "■ up ■ down " in words
            assert tab.evaluate("document.getElementById('key-band').hidden") is (size[1] == 3)


def test_the_switches_change_the_theme_and_the_axis(browser, pages) -> None:
    with browser.open(pages[12, 3].as_uri()) as tab:
        tab.wait_until_drawn()
        tab.evaluate("document.getElementById('theme').click()")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
        tab.evaluate("document.getElementById('by-time').click()")
        tab.wait_for("document.getElementById('by-time').getAttribute('aria-pressed') === 'true'")
        tab.evaluate("document.querySelector('.event .kind').focus()")
        assert tab.wait_for("document.querySelector('.tip').textContent").endswith(".")
        assert tab.errors == []


@pytest.mark.parametrize("size", [(12, 3), (12, 64), (1000, 32)], ids=lambda size: "x".join(map(str, size)))
def test_axe_finds_nothing(browser, pages, size) -> None:
    axe = os.environ.get("AXE")
    if not axe:
        pytest.skip("AXE is not set: npm install axe-core, then AXE=node_modules/axe-core/axe.min.js")
    for dark in (False, True):
        with browser.open(pages[size].as_uri(), dark=dark) as tab:
            tab.wait_until_drawn()
            tab.evaluate(Path(axe).read_text() + ";0")
            found = tab.evaluate(
                "axe.run().then((found) => found.violations.map((one) => one.id + ' ' + one.nodes[0].html.slice(0, 200)"
                " + ' ' + one.nodes[0].failureSummary))"
            )
            assert found == []


def test_a_served_page_fills_itself_stays_when_the_bucket_fails_and_goes_on(browser) -> None:
    run = busy_run(120, 4)
    store = FaultyStore(run.store)
    clock = FixedClock(T0 + 1e4)
    looks = PageLooks(view_of(store), clock, poll_s=0.05)
    with web.bound_socket("127.0.0.1", 0) as listening:
        door = web.make_door("127.0.0.1", listening.getsockname()[1])
        server = web.PageServer(web.PageApp(door, looks.name, lambda: looks.files, lambda: looks.stale), listening)
        server.start()
        try:
            with browser.open(web.page_address("127.0.0.1", door)) as tab:
                tab.wait_for("document.getElementById('stale').textContent.includes('The run is being read')")
                looks.look()
                tab.wait_for("document.documentElement.dataset.drawn === '120'")
                looks.look()
                tab.wait_for("Page.steps.chunkOf(0) !== undefined")
                store.faults += [Fault("get", layout.commit_key(120), error=StoreUnclear("503")) for _ in range(1)]
                clock.at += 60
                looks.look()
                tab.wait_for("document.getElementById('stale').textContent.includes('has given no answer since')")
                run.step(120)
                clock.at += 60
                looks.look()
                tab.wait_for("document.documentElement.dataset.drawn === '121'")
                tab.wait_for("document.getElementById('stale').hidden")
                assert all("127.0.0.1" in url or url.startswith("data:") for url in tab.asked)
                assert tab.errors == []
        finally:
            server.stop()

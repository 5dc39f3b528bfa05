"""A webhook hears each trouble once when it begins and once when it is over; no run waits for it, also if it hangs."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from diloco.process.journal import Journal
from diloco.runlog.reader import Report, read_report
from executors.platforms.places import Place
from executors.preflight.alert_url import take_alert
from executors.preflight.run_url import UsageError
from executors.supervision.notices import VARIABLE
from executors.supervision.notices.alerts import Alerts, changes, host_of, post, told
from executors.supervision.notices.asked_for import alerts_of
from executors.supervision.notices.messages import all_troubles, message_lines
from rendezvous.agreement.membership import write_control
from tests.diloco.test_report import T0, Bucket, FixedClock
from tests.support.loopback import serve
from tests.support.proxies import WantsLogin

SECRET = "s3cr3t-token"
LIMIT_S = 120.0  # finds a hang


class Hook:
    """answer: a status, "hang", or a place to redirect to; heard: the bodies of all requests."""

    def __init__(self) -> None:
        self.answer: int | str = 200
        self.heard: list[dict[str, Any]] = []
        self.arrived = threading.Semaphore(0)
        self.release = threading.Event()
        self.url = ""

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        self.heard.append(json.loads(request.rfile.read(int(request.headers["Content-Length"]))))
        self.arrived.release()
        if self.answer == "hang":
            self.release.wait(LIMIT_S)
            return
        request.send_response(self.answer if isinstance(self.answer, int) else 302)
        if isinstance(self.answer, str):
            request.send_header("Location", self.answer)
        request.send_header("Content-Length", "0")
        request.end_headers()

    @property
    def texts(self) -> list[str]:
        return [body["text"] for body in self.heard]


@contextmanager
def listening() -> Iterator[Hook]:
    hook = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hook.handle(self)

        def do_GET(self) -> None:
            raise AssertionError("a redirect was followed")

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    hook.url = f"http://127.0.0.1:{server.server_port}/hook/{SECRET}"
    try:
        yield hook
    finally:
        hook.release.set()
        server.shutdown()
        server.server_close()


class World:
    """A run of six outer steps, and supervisors that look at it one after the other."""

    def __init__(self) -> None:
        self.run = Bucket(steps=100)
        for slot in ("r00", "r01"):
            self.run.claim(slot, 1, 0.5)
        for t in range(6):
            self.step(t)
        self.clock = FixedClock(T0 + 601)
        self.generation = 0

    def step(self, t: int) -> None:
        self.run.commit(t, 100.0 * (t + 1), [self.run.offer(t, slot, 1, 0.2) for slot in ("r00", "r01")])

    def report(self) -> Report:
        return read_report(self.run.store)

    def supervisor(self, url: str, limit_s: float = 60.0, pauses_s: tuple[float, ...] = (0.0, 0.0)) -> Alerts:
        self.generation += 1
        journal = Journal(self.run.store, self.clock, "supervisor", self.generation)

        def emit(event: str, **fields: object) -> None:
            journal.emit(event, **fields)
            journal.flush()

        return Alerts(url, self.clock, emit, pauses_s=pauses_s, limit_s=limit_s, check_s=0.0)

    def tick_until(self, alerts: Alerts, *events: str) -> list[dict[str, Any]]:
        """Look until these events are in the log, as many as are named."""
        until = time.monotonic() + LIMIT_S
        while True:
            alerts.tick(self.report())
            found = self.report().of_kind("alerted", "alert_failed")
            if [e["event"] for e in found] == list(events):
                return found
            assert time.monotonic() < until, found
            time.sleep(0.005)

    def stall(self) -> None:
        self.clock.at = T0 + 1000.0


def test_a_trouble_is_told_once_when_it_begins_and_once_when_it_is_over() -> None:
    world = World()
    with listening() as hook:
        alerts = world.supervisor(hook.url)
        alerts.tick(world.report())
        world.stall()
        world.tick_until(alerts, "alerted")
        for _ in range(3):
            alerts.tick(world.report())
        for t in range(6, 8):
            world.run.commit(t, 1000.0, [world.run.offer(t, "r00", 1, 0.2)])
        world.tick_until(alerts, "alerted", "alerted")
        alerts.close()
    begun, over = hook.heard
    assert begun["text"].startswith("diloco synthetic: stalled: no outer step for") and "diloco resume" in begun["text"]
    assert (
        begun["kind"] == "stalled" and begun["state"] == "begun" and begun["step"] == 6 and begun["run"] == "synthetic"
    )
    assert over["state"] == "over" and over["id"] == begun["id"] and "stalled: over (" in over["text"]


def test_a_trouble_of_a_runs_last_seconds_is_told() -> None:
    world = World()
    with listening() as hook:
        journal = Journal(world.run.store, world.clock, "supervisor", 9)
        alerts = Alerts(hook.url, world.clock, journal.emit, check_s=3600.0)
        alerts.tick(world.report())
        world.stall()
        alerts.tick(world.report())
        assert alerts._messenger is not None and alerts._messenger.open == 0, "it is not time"
        alerts.tick(world.report(), last=True)
        alerts.close()
    assert [body["kind"] for body in hook.heard] == ["stalled"]


def test_a_supervisor_that_was_restarted_does_not_repeat_what_was_told() -> None:
    world = World()
    world.stall()
    with listening() as hook:
        world.tick_until(world.supervisor(hook.url), "alerted")
        second = world.supervisor(hook.url)
        for _ in range(3):
            second.tick(world.report())
        world.run.commit(6, 1000.0, [world.run.offer(6, "r00", 1, 0.2)])
        world.tick_until(second, "alerted", "alerted")
    assert [body["state"] for body in hook.heard] == ["begun", "over"]


def test_what_a_killed_supervisor_had_not_delivered_the_next_one_tells_with_the_same_id() -> None:
    world = World()
    world.stall()
    with listening() as hook:
        hook.answer = "hang"
        world.supervisor(hook.url).tick(world.report())
        assert hook.arrived.acquire(timeout=LIMIT_S)
        hook.answer = 200
        world.tick_until(world.supervisor(hook.url), "alerted")
    assert len({body["id"] for body in hook.heard}) == 1 and len(hook.heard) == 2


@pytest.mark.parametrize(
    ("answer", "words", "tries"),
    [
        (500, "it answered 500, 3 times", 3),
        (403, "it answered 403", 3),
        ("http://127.0.0.1:9/x", "a redirect is not", 3),
    ],
)
def test_an_answer_that_is_none_is_asked_for_again_and_then_said_in_status(
    answer: int | str, words: str, tries: int
) -> None:
    world = World()
    world.stall()
    with listening() as hook:
        hook.answer = answer
        failed = world.tick_until(world.supervisor(hook.url), "alert_failed")[0]
    assert words in failed["text"] and len(hook.heard) == tries
    lines = message_lines(world.report(), world.clock.at)
    assert any(line.startswith("! alerts do not reach 127.0.0.1: it answered") for line in lines), lines
    assert SECRET not in json.dumps(world.report().events) + "".join(lines)


def test_a_refused_connection_is_said_and_the_url_is_not() -> None:
    with listening() as hook:
        url = hook.url
    world = World()
    world.stall()
    failed = world.tick_until(world.supervisor(url), "alert_failed")[0]
    assert "Connection refused, 3 times" in failed["text"] and SECRET not in json.dumps(failed)


def test_a_webhook_that_hangs_delays_no_look_and_is_given_up() -> None:
    world = World()
    world.stall()
    with listening() as hook:
        hook.answer = "hang"
        alerts = world.supervisor(hook.url, limit_s=-0.8)  # 0.2 s in all
        alerts.tick(world.report())
        assert hook.arrived.acquire(timeout=LIMIT_S)
        assert not world.report().of_kind("alerted", "alert_failed"), "the look came back before any answer"
        assert "no answer within" in world.tick_until(alerts, "alert_failed")[0]["text"]
        alerts.close()


def test_the_end_waits_a_moment_only_for_a_webhook_that_hangs() -> None:
    world = World()
    world.stall()
    with listening() as hook:
        hook.answer = "hang"
        alerts = world.supervisor(hook.url)
        alerts.tick(world.report())
        world.clock.at += 4.9  # of CLOSE_S; the fake clock stands still, so each wait is one look
        clock = iter([0.0, 4.9, 5.1])
        alerts._clock = replace_now(clock)  # pyright: ignore
        alerts.close()
    assert not world.report().of_kind("alerted", "alert_failed")


def replace_now(times: Iterator[float]) -> Any:
    class Clock(FixedClock):
        def now(self) -> float:
            return next(times)

    return Clock()


def test_nothing_is_told_of_a_run_that_is_asked_to_stop_and_nobody_is_told_without_a_url() -> None:
    world = World()
    world.stall()
    silent = alerts_of("", world.clock, lambda *_, **__: pytest.fail("it said something"))
    silent.tick(world.report())
    silent.close()
    with listening() as hook:
        write_control(world.run.store, world.run.clock, stop=True)
        world.supervisor(hook.url).tick(world.report())
        assert not hook.heard and not world.report().of_kind("trouble")


def test_what_the_log_tells_is_what_was_told() -> None:
    world = World()
    world.stall()
    found = all_troubles(world.report(), world.clock.at)
    news = changes({}, found, 5.0)
    assert [m["state"] for m in news] == ["begun"] and news[0]["id"] == "stalled-run-5.000"
    began, waiting = told([{**news[0], "event": "trouble", "who": "supervisor-1", "at": 5.0}])
    assert not changes(began, found, 6.0) and len(waiting) == 1
    moved = [replace(found[0], text="much longer")]
    assert not changes(began, moved, 6.0), "a text that moves on is the same trouble"
    began, waiting = told([{**news[0], "event": "trouble", "who": "r00-1", "at": 5.0}])
    assert not began and not waiting, "a replica's log is nobody's word of this"
    odd = {"event": "trouble", "who": "supervisor-1", "at": 5.0, "slot": "", "kind": 7, "id": ["x"]}
    assert told([odd]) == ({}, []) and told([{**odd, "event": "alerted"}]) == ({}, [])


# -------------------------------------------------------------------- the address


@pytest.mark.parametrize("url", ["ftp://h/s3cr3t", "s3cr3t", "https://", "http://h:s3cr3t/", "https://h/s3cr3t\n"])
def test_an_address_that_is_none_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a webhook") as error:
        take_alert(url, [Place("local")], detach=False, environ={})
    assert "s3cr3t" not in str(error.value)
    said = list[str]()
    alerts_of(url, FixedClock(), lambda event, **about: said.append(f"{event} {about}")).close()
    assert len(said) == 1 and "no alert is sent" in said[0] and "s3cr3t" not in said[0]


def test_only_the_host_is_shown() -> None:
    assert host_of(f"https://user:{SECRET}@hooks.example.com/services/{SECRET}?key={SECRET}") == "hooks.example.com"
    assert SECRET not in post(f"http://127.0.0.1:9/{SECRET}", b"{}")


def test_a_proxy_in_between_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with squid and tinyproxy: the whole reason was 'OSError'."""
    with serve(WantsLogin) as proxy:
        monkeypatch.setenv("https_proxy", proxy)
        said = post(f"https://hooks.example.com/{SECRET}", b"{}")
    assert "407 Proxy Authentication Required. The proxy wants a name and a password" in said and SECRET not in said


def test_a_supervisor_elsewhere_gets_the_address_as_a_secret_or_the_command_says_how() -> None:
    url = f"https://hooks.example.com/{SECRET}"
    environ: dict[str, str] = {}
    for places in ([Place("modal")], [Place("hf-jobs")]):
        with pytest.raises(UsageError, match="--secret") as error:
            take_alert(url, places, detach=True, environ=environ)
        assert SECRET not in str(error.value) and not environ
    take_alert(url, [Place("modal"), Place("local")], detach=True, environ=environ)
    assert environ == {VARIABLE: url}, "a mixed fleet's supervisor lives here"
    for places, detach in (([Place("modal")], False), ([Place("hf-jobs", secrets=(VARIABLE,))], True)):
        environ.clear()
        take_alert(url, places, detach=detach, environ=environ)
        assert environ == {VARIABLE: url}
    with pytest.raises(UsageError, match="which the bucket shows"):
        take_alert(None, [Place("local", env={VARIABLE: url})], detach=False, environ={})

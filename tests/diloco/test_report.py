"""A synthetic run: two replicas, one of them killed in step 2 and replaced; read back, told, drawn."""

import json
from dataclasses import replace

import pytest

from diloco.run.record import RunRecord
from diloco.runlog.reader import Reader, Report, first_and_last, read_report
from diloco.runlog.summary import actor_words, checks, solo_words, summary
from diloco.views.page import charts
from diloco.views.page.charts import draw_figure, write_picture
from diloco.views.page.data import page_data
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.records.digests import SHA256, digest
from rendezvous.records.records import Beat, Claim, Commit, Leave, Listed, Offer
from rendezvous.store import Store
from rendezvous.stores.memory import MemoryStore

T0 = 1_800_000_000.0
STEPS, BYTES = 6, 400_000


class FixedClock:
    def __init__(self, wall: float = T0) -> None:
        self.at = wall

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class Bucket:
    """Writes a run by hand: the records of `rendezvous`, without its engine."""

    def __init__(self, steps: int = STEPS, replicas: int = 2, store: Store | None = None) -> None:
        self.store, self.clock = store or MemoryStore(), FixedClock()
        if store is None:  # else the run is founded already
            config = {"name": "synthetic", "outer": {"sync_every": 6}}
            record = RunRecord(config, {"outer": {}}, {}, "n", T0)
            self.store.put(layout.RUN, record.encode())
            write_control(self.store, self.clock, replicas=replicas, steps=steps, min_replicas=1)
        self.prev: str | None = None
        self._logs: dict[tuple[str, int], int] = {}

    def claim(self, slot: str, generation: int, at: float, pid: int = 1) -> None:
        body = Claim(slot, generation, "n", T0 + at, "host", pid).encode()
        self.store.create(layout.claim_key(slot, generation), body)

    def tell(self, who: str, generation: int, at: float, event: str, /, **fields: object) -> None:
        n = self._logs.get((who, generation), 0)
        if who == "supervisor" and n == 0:
            self.claim(who, generation, at)
        self._logs[who, generation] = n + 1
        line = json.dumps({"at": T0 + at, "event": event, **fields})
        self.store.put(layout.log_key(who, generation, n), line.encode() + b"\n")

    def offer(self, t: int, slot: str, generation: int, reward: float) -> Listed:
        blob = layout.delta_blob(t, slot, generation, "n")
        nonce = f"{t}{slot}"
        stats = {"reward": reward}
        offer = Offer(t, slot, generation, nonce, "base", 6, blob, BYTES, "d", took=1.0, at=T0, stats=stats)
        self.store.create(layout.offer_key(t, slot, 0), offer.encode())
        return Listed(t, slot, generation, nonce, blob, BYTES, "d", 6, 1.0)

    def commit(self, t: int, at: float, offers: list[Listed]) -> None:
        c = Commit(t, self.prev, "base", tuple(offers), {}, 1, 1.0, 0, f"{offers[0].slot}-1", f"c{t}", T0 + at)
        self.store.create(layout.commit_key(t), c.encode())
        self.prev = digest(c.encode(), SHA256)
        for o in offers:
            if o.step == t:
                self.step_event(t, at, o.slot, o.generation)

    def step_event(self, t: int, at: float, slot: str, generation: int, theta: str | None = None) -> None:
        self.tell(
            slot, generation, at + 0.01, "step", step=t, h=6, listed=True, samples=192, inner_s=1.4, offer_s=0.05,
            wait_s=0.3, mean_s=0.02, bytes_up=BYTES, bytes_down=2 * BYTES, theta=theta or f"theta{t}",
        )  # fmt: skip


def killed_and_replaced(store: Store | None = None) -> Bucket:
    b = Bucket(store=store)
    for i, slot in enumerate(("r00", "r01")):
        b.tell("supervisor", 1, 0.1 + i / 100, "launched", slot=slot, pid=100 + i, attempt=1)
        b.claim(slot, 1, 0.5, pid=100 + i)
        b.tell(slot, 1, 4.0, "joined", step=0, snapshot=0, replayed=0)
    late = None
    for t in range(STEPS):
        offers = [b.offer(t, "r00", 1, 0.1 + 0.15 * t)]
        if t < 2 or t > 3:
            offers.append(b.offer(t, "r01", 1 if t < 2 else 2, 0.25 + 0.15 * t))
        if t == 2:
            late = b.offer(2, "r01", 1, 0.5)
        if t == 3 and late is not None:
            offers.append(late)
        b.commit(t, 6.0 + 2 * t, offers)
    b.tell("supervisor", 1, 9.2, "killed", slot="r01", pid=101, step=2, inner=3)
    b.tell("supervisor", 1, 9.3, "lost", slot="r01", pid=101, exit_code=-9, tail=[])
    b.claim("r01", 2, 9.6, pid=102)
    b.tell("r01", 2, 12.5, "joined", step=3, snapshot=0, replayed=3)
    leave = Leave("r00", 1, STEPS, "base", "done", "n", T0 + 17)
    b.store.create(layout.leave_key("r00", 1), leave.encode())
    b.store.put(layout.beat_key("r01"), Beat("r01", 2, 9, "train", 5, 3, 0.2, T0 + 16.0).encode())
    b.store.put(layout.beat_key("supervisor"), Beat("supervisor", 1, 9, "left", 0, 0, 0.0, T0 + 17.0).encode())
    return b


def test_every_session_is_told_apart_with_its_end():
    sessions = {x.name: x for x in read_report(killed_and_replaced().store).sessions}
    assert list(sessions) == ["r00-1", "r01-1", "r01-2"]
    assert [sessions[n].how for n in sessions] == ["done", "killed", "running"]
    assert sessions["r01-1"].ended == pytest.approx(T0 + 9.2)
    assert [t for t, _ in sessions["r01-1"].commits] == [0, 1, 3]  # the last one by its carried offer
    assert sessions["r01-2"].joined_step == 3


def test_steps_have_rewards_and_what_was_counted_later():
    report = read_report(killed_and_replaced().store)
    assert report.head == STEPS and report.done
    assert report.steps[3].carried == (("r01", 2),)
    assert report.steps[2].fresh == ("r00",)
    assert report.steps[2].reward == {"r00": pytest.approx(0.4), "r01": 0.5}  # told when its offer was listed
    assert first_and_last(report) == (pytest.approx(0.175), pytest.approx(0.925))
    assert report.steps[0].part("inner_s") == pytest.approx(1.4)


def test_a_reader_that_looks_again_sees_what_one_look_sees():
    b, whole = Bucket(), None
    reader = Reader(b.store)
    b.claim("r00", 1, 0.5)
    for t in range(3):
        b.commit(t, 2.0 * t, [b.offer(t, "r00", 1, 0.1 * t)])
        whole = reader.refresh()
    assert whole == read_report(b.store)


def test_checks_hold_for_a_good_run():
    assert [c.ok for c in checks(read_report(killed_and_replaced().store))] == [True, True, True]


def test_checks_see_a_fork_a_double_count():
    b = Bucket(steps=4)
    b.claim("r00", 1, 0.0)
    b.claim("r01", 1, 0.0)
    first = b.offer(0, "r00", 1, 0.1)
    b.commit(0, 1.0, [first])
    b.step_event(0, 1.0, "r01", 1, theta="another")
    b.commit(1, 2.0, [b.offer(1, "r00", 1, 0.1), first])
    found = checks(read_report(b.store))
    assert [c.ok for c in found] == [True, False, False]
    assert (
        "2 of 4 outer steps committed so far" in found[0].text
        and "1 pseudogradients counted twice" in found[1].text
        and "[0]" in found[2].text
    )


def test_a_check_that_compared_nothing_does_not_say_that_all_was_equal():
    """Of a run whose commit 0 was deleted, the report said "bit-identical on all replicas (0 digests)"."""
    assert [c.text for c in checks(read_report(Bucket().store))][2] == "θ not compared: no digest is known"


def test_checks_see_a_broken_chain():
    b = Bucket(steps=2)
    b.claim("r00", 1, 0.0)
    b.commit(0, 1.0, [b.offer(0, "r00", 1, 0.1)])
    b.prev = "somebody else's"
    b.commit(1, 2.0, [b.offer(1, "r00", 1, 0.1)])
    assert not checks(read_report(b.store))[0].ok


def test_summary_fits_one_screen():
    text = summary(read_report(killed_and_replaced().store))
    assert len(text.splitlines()) <= 24 and max(map(len, text.splitlines())) <= 80
    assert "6 of 6 outer steps" in text and "killed at 9.1 s" in text and "400 kB up" in text


def test_summary_of_many_sessions_still_fits():
    b = Bucket(steps=2, replicas=40)
    for i in range(40):
        b.claim(layout.slot_name(i), 1, 0.1)
    text = summary(read_report(b.store))
    assert len(text.splitlines()) <= 24 and "more sessions" in text


def test_a_run_that_has_just_begun_can_be_told_and_drawn(tmp_path):
    report = read_report(Bucket().store)
    assert "0 of 6" in summary(report)
    assert write_picture(report, tmp_path).stat().st_size > 1000


def test_the_words_of_an_early_kill_do_not_run_into_the_title(monkeypatch):
    marks = [(0.6, "r01 lost", "right"), (0.7, "r01 is back", "left")]
    monkeypatch.setattr(charts, "_mark_interruptions", lambda report: marks)
    figure = draw_figure(read_report(killed_and_replaced().store))
    figure.canvas.draw()
    curve = figure.axes[0]
    words = [text.get_window_extent() for text in curve.texts]
    assert len(words) == 2 and not any(curve._left_title.get_window_extent().overlaps(box) for box in words)


@pytest.mark.slow
def test_the_picture_is_a_png_in_a_folder_that_is_made(tmp_path):
    png = write_picture(read_report(killed_and_replaced().store), tmp_path / "new")
    assert png.read_bytes().startswith(b"\x89PNG")


def with_an_actor() -> Report:
    """Of two sessions of one actor, the first was killed; its sampling fills the log."""
    b = killed_and_replaced()
    write_control(b.store, b.clock, actors=1)
    for generation, claimed in ((1, 1.0), (2, 8.0)):
        b.claim("a00", generation, claimed, pid=200 + generation)
        b.tell("a00", generation, claimed + 1, "joined", step=0)
        b.tell("a00", generation, claimed + 2, "sampled", step=0, place="r00/1", stands=True, tokens=9, seconds=0.2)
    b.tell("supervisor", 1, 7.5, "lost", slot="a00", pid=201, exit_code=-9, tail=[])
    b.store.put(layout.beat_key("a00"), Beat("a00", 2, 9, "sample", 5, 3, 0.2, T0 + 16.0).encode())
    return read_report(b.store)


def test_an_actor_has_lanes_and_a_line_and_is_no_replica(tmp_path):
    """The picture and the page ended with an error, and the page counted actors as replicas."""
    report = with_an_actor()
    figure = draw_figure(report)
    lanes = [text.get_text() for text in figure.axes[1].get_yticklabels()]
    assert lanes == ["a00-1", "a00-2", "r00-1", "r01-1", "r01-2"]
    page = page_data(report, T0 + 17.0)["head"]
    assert [one["name"] for one in page["sessions"] if one["actor"]] == ["a00-1", "a00-2"]
    assert page["slots"] == ["r00", "r01"] and page["actors"] == actor_words(report)
    assert set(page["counted"]) == {"r00", "r01"} and {e["kind"] for e in page["events"]}.isdisjoint({"sampled"})


def test_an_actors_clock_does_not_change_a_runs_age():
    """An actor by hand, on a laptop whose clock was an hour behind, made the run an hour older in `status`."""
    plain, b = read_report(killed_and_replaced().store), killed_and_replaced()
    write_control(b.store, b.clock, actors=2)
    b.claim("a00", 1, -3600.0)
    b.tell("a00", 1, -3590.0, "sampled", step=0, prompts=8)
    b.claim("a01", 1, 3600.0)
    report = read_report(b.store)
    assert len(report.sessions) == 5 and (report.began, report.ended) == (plain.began, plain.ended)


def test_damaged_log_lines_are_skipped():
    b = killed_and_replaced()
    b.store.put(layout.log_key("r00", 1, 999), b'{"at": 1, "ev\n\xff\xfe\n')
    assert read_report(b.store).head == STEPS


def numbered(gated: bool = True, **more: float) -> Bucket:
    """Two outer steps; in the second r01 is gated and r00 tells its numbers."""
    b = Bucket(steps=2)
    for slot in ("r00", "r01"):
        b.claim(slot, 1, 0.5)
    b.commit(0, 2.0, [b.offer(0, "r00", 1, 0.1)])
    last = replace(b.offer(1, "r01", 1, 0.1), factor=0.01 if gated else 1.0)
    b.commit(1, 4.0, [b.offer(1, "r00", 1, 0.1), last])
    told = {"rho": 0.9, "effective_step": 1.27, "cos_pair": 0.25, "mean_norm": 3.0, "outer_lr": 0.7, **more}
    b.tell("r00", 1, 4.0, "step", step=1, **told)
    return b


def test_the_numbers_of_an_outer_step_are_told():
    report = read_report(numbered().store)
    assert report.steps[1].numbers["outer_lr"] == 0.7 and report.steps[0].numbers == {}
    text = summary(report)
    assert "outer step 1: ρ 0.90 · η_eff 1.27 · cos of replicas 0.25 · ‖ḡ‖ 3" in text
    assert "counted as one of typical length: r01@1" in text
    assert "typical length" not in summary(read_report(numbered(gated=False).store))


def test_a_step_of_one_replica_alone_is_said_while_it_is_the_newest():
    b = Bucket(steps=3)
    b.claim("r00", 1, 0.5)
    b.commit(0, 2.0, [b.offer(0, "r00", 1, 0.1)])
    report = read_report(b.store)
    assert solo_words(report) == "solo: outer step 0 was taken by r00 alone, unconfirmed (min_replicas = 1)"
    assert "by one replica alone (unconfirmed): 1 of 1" in summary(report)
    b.claim("r01", 1, 2.5)
    b.commit(1, 4.0, [b.offer(1, "r00", 1, 0.1), b.offer(1, "r01", 1, 0.1)])
    assert solo_words(read_report(b.store)) == "" and solo_words(read_report(Bucket().store)) == ""


def held_out_event(step: int, mean: float, *, share: int = 0) -> dict[str, object]:
    sums = [10, 10 * mean, 10 * mean * mean + 1.0]
    return {"step": step, "share": share, "shares": 2, "prompts": 10, "total": 20, "greedy": {"reward": sums}}


def test_held_out_rewards_are_told_and_drawn_beside_those_of_training():
    b = killed_and_replaced()
    b.tell("r00", 1, 5.0, "evaluated", **held_out_event(0, 0.125))
    b.tell("r01", 1, 5.1, "evaluated", **held_out_event(0, 0.125, share=1))
    b.tell("r00", 1, 16.0, "evaluated", **held_out_event(STEPS, 0.75))  # r01 was lost before it scored its share
    report = read_report(b.store)
    text = summary(report)
    assert f"held out @{STEPS}: greedy 0.750 ± 0.105, 10/20 prompts" in text
    assert "held out     0.125 ▁█ 0.750" in text
    assert all(check.ok for check in checks(report))
    figure = draw_figure(report)
    (drawn,) = figure.axes[0].containers
    assert drawn.get_label() == "held out, greedy"
    assert list(drawn.lines[0].get_xdata()) == [0, STEPS] and figure.axes[0].get_xlim()[1] > STEPS


def test_a_line_of_numbers_that_is_too_long_ends_after_a_whole_one():
    text = summary(read_report(numbered(cross_term=0.0022).store))
    (line,) = [line for line in text.splitlines() if line.startswith("  outer step 1")]
    assert line == "  outer step 1: ρ 0.90 · η_eff 1.27 · cos of replicas 0.25 …"

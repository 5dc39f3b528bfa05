"""A planted case for each trouble, beside a near-miss that must stay silent; hand-written buckets."""

import re
from collections.abc import Callable, ValuesView
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.events import KINDS
from diloco.run.record import RunRecord
from diloco.runlog.reader import Report, read_report
from diloco.runlog.scope import STATUS
from diloco.views.overview import overview, session_rows
from diloco.views.troubles import DETECTORS, PAGE, Spending, Trouble, find_troubles, flagged_steps
from executors.supervision.notices import messages
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.records.records import Beat, Offer, decode_or_none
from tests.diloco.test_report import T0, Bucket, killed_and_replaced
from tests.support.long_run import STEP_S, long_run

ROOT = Path(__file__).parents[2]
GAP_S = 100.0
CONFIG = {"name": "planted", "outer": {"sync_every": 6, "snapshot_every": 4}}
Numbers = Callable[[int], dict[str, float]]


class Planted(Bucket):
    """steps outer steps of r00 and r01, GAP_S apart.   numbers(t): of each replica's step."""

    def __init__(self, steps: int, numbers: Numbers = lambda t: {}, **wishes: Any) -> None:
        super().__init__(steps=1000)
        self.store.put(layout.RUN, RunRecord(CONFIG, {"outer": {}}, {}, "planted", T0).encode())
        if wishes:
            write_control(self.store, self.clock, **wishes)
        self.numbers = numbers
        for slot in ("r00", "r01"):
            self.claim(slot, 1, 0.5)
            self.tell(slot, 1, 1.0, "joined", step=0)
        for t in range(steps):
            self.step(t)

    def step(self, t: int) -> None:
        self.commit(t, GAP_S * (t + 1), [self.offer(t, slot, 1, self.reward(t)) for slot in ("r00", "r01")])

    def reward(self, t: int) -> float:
        return self.numbers(t).get("reward", 0.2)

    def step_event(self, t: int, at: float, slot: str, generation: int, theta: str | None = None) -> None:
        self.tell(slot, generation, at + 0.01, "step", step=t, h=6, **{"reward": 0.2, **self.numbers(t)})

    def report(self) -> Report:
        found = read_report(self.store)
        for step in found.steps:
            step.snapshot = step.t // 4 * 4
        return found


def found_in(report: Report, after_s: float = 1.0, spent: Spending | None = None) -> dict[str, Trouble]:
    """By kind, so long after the newest commit."""
    return {t.kind: t for t in find_troubles(report, report.steps[-1].at + after_s, spent)}


def kinds(run: Planted, after_s: float = 1.0, spent: Spending | None = None) -> list[str]:
    return list(found_in(run.report(), after_s, spent))


# -------------------------------------------------------------------- no false alarms


def test_ordinary_runs_are_silent() -> None:
    for run, now in ((killed_and_replaced(), T0 + 1e6), (long_run(40, 4), T0 + 40 * STEP_S + 10)):
        report = read_report(run.store)
        for step in report.steps:
            step.snapshot = step.t
        assert not find_troubles(report, now, Spending(1.0, 0.1))
    empty = Bucket()
    assert not find_troubles(read_report(empty.store), T0 + 1e6)


# -------------------------------------------------------------------- the fleet


def test_no_commit_for_three_times_the_median_is_a_stall() -> None:
    run = Planted(6)
    assert kinds(run, 2.9 * GAP_S) == []
    seen = found_in(run.report(), 3.1 * GAP_S)["stalled"]
    assert "no outer step for 5 min 10 s, where 100 s are usual; 0 of 2 replicas beat" in seen.text and seen.step == 6
    assert "diloco resume" in seen.advice and seen.page == "stalled" and PAGE in seen.line


def test_a_run_that_warms_up_was_stopped_is_done_or_evaluates_does_not_stall() -> None:
    assert kinds(Planted(3), 1e4) == []
    run = Planted(6)
    now = T0 + 6 * GAP_S + 1e4
    run.store.put(layout.beat_key("r00"), Beat("r00", 1, 9, "train", 6, 0, 1.0, now, evaluates=True).encode())
    assert kinds(run, 1e4) == []
    run.store.put(layout.beat_key("r00"), Beat("r00", 1, 9, "train", 6, 0, 1.0, now, note="waits for r01").encode())
    assert "1 of 2 replicas beat; r00: waits for r01" in found_in(run.report(), 1e4)["stalled"].text
    write_control(run.store, run.clock, stop=True)
    assert kinds(run, 1e4) == []
    write_control(run.store, run.clock, stop=False, steps=6)
    assert run.report().done and kinds(run, 1e4) == []


def test_an_evaluation_a_new_supervisor_and_a_fleet_that_joins_anew_have_their_time() -> None:
    run = Planted(6)
    run.tell("r00", 1, 7 * GAP_S, "evaluated", step=6, share=0, shares=1, prompts=1, total=1, seconds=500.0)
    assert kinds(run, 5.5 * GAP_S) == [] and kinds(run, 8.5 * GAP_S) == ["stalled"]
    run = Planted(6)
    run.tell("supervisor", 1, 16 * GAP_S, "started")
    assert kinds(run, 12.9 * GAP_S) == [] and kinds(run, 13.1 * GAP_S) == ["stalled"]
    run = Planted(6)
    for slot in ("r00", "r01"):
        run.claim(slot, 2, 16 * GAP_S)
        run.tell(slot, 2, 16 * GAP_S, "joined", step=6)
    assert kinds(run, 12.9 * GAP_S) == [] and kinds(run, 13.1 * GAP_S) == ["stalled"]


def lose(run: Bucket, slot: str, *times: float) -> None:
    for at in times:
        run.tell("supervisor", 1, at, "lost", slot=slot, generation=1, reason="exit code -9")


def test_a_slot_that_is_lost_three_times_is_told_and_two_times_are_not() -> None:
    run = Planted(6)
    lose(run, "r01", 150.0, 250.0)
    assert kinds(run) == []
    lose(run, "r01", 350.0)
    seen = found_in(run.report())["slot_lost"]
    assert (seen.slot, seen.step) == ("r01", 1) and "lost 3 times in a row, the newest: exit code -9" in seen.text


def test_losses_with_much_work_in_between_are_ordinary_and_much_work_ends_the_trouble() -> None:
    run = Planted(45)
    lose(run, "r01", 150.0, 2350.0, 4450.0)
    assert kinds(run) == []
    run = Planted(10)
    lose(run, "r01", 150.0, 250.0, 350.0)
    for t in range(10, 22):
        run.step(t)
    assert kinds(run) == ["slot_lost"]
    run.step(22)
    assert kinds(run) == []


def test_four_fifths_of_a_budget_are_told() -> None:
    run = Planted(6, max_usd=50.0, max_hours=10.0)
    assert kinds(run, spent=Spending(39.9, 7.9, 2.0)) == [] and kinds(run) == []
    seen = found_in(run.report(), spent=Spending(40.0, 8.5, 2.0))["budget"]
    assert (
        "$40.00 of $50.00 are spent (80%), which last for 5 h 00 min and 8.50 of 10 hours are over (85%)" in seen.text
    )
    assert kinds(Planted(6), spent=Spending(1e6, 1e6)) == []


def test_a_replica_that_diverged_is_told_until_its_slot_is_counted_again() -> None:
    run = Planted(6)
    run.tell("r01", 1, 601.0, "diverged", step=6, text="θ of fragment 0 has another digest")
    seen = found_in(run.report())["diverged"]
    assert seen.slot == "r01" and "θ of fragment 0" in seen.text
    assert "other weights than the run" in seen.text and "NaN" not in seen.text
    assert "another machine" in seen.advice and "inner.lr" not in seen.advice
    for advice in (seen.advice, KINDS["diverged"].advice):  # one of its causes is on every machine (outer/frozen.py)
        assert "another machine" in advice and "your own code" in advice and "frozen weights" in advice
    run.step(6)
    assert kinds(run) == []


@pytest.mark.parametrize("who", ["itself", "whoever averages"])
def test_a_pseudogradient_that_is_no_number_is_told(who: str) -> None:
    run = Planted(6)
    if who == "itself":
        run.tell("r01", 1, 601.0, "bad_delta", text="its pseudogradient has a NaN")
    else:
        run.tell("r00", 1, 601.0, "poisoned", step=6, blob=layout.delta_blob(6, "r01", 1, "n"), text="NaN")
    seen = [t for t in find_troubles(run.report(), T0 + 602) if t.kind == "diverged"]
    assert [t.slot for t in seen] == ["r01"]
    assert "NaN or infinity" in seen[0].text and "inner.lr" in seen[0].advice


def test_a_gated_replica_is_told_for_ten_outer_steps() -> None:
    report = Planted(14).report()
    report.steps[3].gated = ("r01",)
    assert "gated" not in found_in(report)
    report.steps[4].gated = report.steps[6].gated = ("r01",)
    seen = found_in(report)["gated"]
    assert (seen.slot, seen.step) == ("r01", 4) and "outer steps 4, 6" in seen.text


def test_a_snapshot_that_is_two_periods_old_is_told() -> None:
    report = Planted(12).report()
    for step in report.steps:
        step.snapshot = 2
    assert list(found_in(report)) == []
    report.steps[-1].snapshot = 1
    seen = found_in(report)["snapshot_late"]
    assert "that of outer step 1, 11 steps ago; one is due every 4 steps" in seen.text and seen.step == 5


@pytest.mark.parametrize(
    ("skew_s", "told"),
    [(-3 * 86400.0, "3 d 00 h behind the outer steps"), (5 * 3600.0, "5 h 00 min ahead"), (-20.0, ""), (20.0, "")],
)
def test_a_clock_that_differs_is_told_and_its_replica_is_not_silent(skew_s: float, told: str) -> None:
    """Before: a replica that trained was "silent" for three days."""
    report = Planted(12).report()
    now = report.steps[-1].at + 1.0
    report.beats["r01"] = Beat("r01", 1, 9, "train", 12, 0, 0.0, now + skew_s)
    seen = [one for one in find_troubles(report, now) if one.kind == "clock"]
    assert [told in one.text and one.slot == "r01" for one in seen] == ([True] if told else [])
    row = next(row for row in session_rows(report, now, {}) if row.slot == "r01" and row.is_newest)
    assert row.phase == "train" and row.beat_age_s is not None and row.beat_age_s < 5


def test_a_clock_of_this_machine_that_is_behind_is_told_once() -> None:
    """Before: each replica was accused of a clock that is ahead."""
    report = Planted(12).report()
    now = report.steps[-1].at - 7200.0
    for slot in ("r00", "r01"):
        report.beats[slot] = Beat(slot, 1, 9, "train", 12, 0, 0.0, now + 7200.0)
    (seen,) = [one for one in find_troubles(report, now) if one.kind == "clock"]
    assert seen.slot == "" and seen.text == "this machine's clock is 2 h 00 min behind the clocks of all 2 replicas"


def skewed(
    closers: str, skews: dict[str, float], beats: dict[str, tuple[str, float]], open_s: float
) -> tuple[Report, float]:
    """A report of one outer step per digit of `closers`, 0 for r00 and 1 for r01, and the time `open_s` later.

    skews: seconds by which a replica's clock is ahead.   beats: slot -> (phase, seconds since its heartbeat)."""
    report = Planted(len(closers)).report()
    now = report.steps[-1].at + open_s
    for step, closer in zip(report.steps, closers, strict=True):
        step.by = f"r0{closer}-1"
        step.at += skews.get(f"r0{closer}", 0.0)
    for slot, (phase, age_s) in beats.items():
        at = now - age_s + skews.get(slot, 0.0)
        report.beats[slot] = Beat(slot, 1, 9, phase, len(closers), 0, 0.0, at)
    return report, now


BOTH = {"r00": ("train", 0.2), "r01": ("train", 0.2)}
KILLED = {"r00": ("train", 0.2), "r01": ("train", 71.0)}
ALONE = {"r00": ("train", 0.2)}
AHEAD, BEHIND = {"r00": 7200.0}, {"r00": -2700.0}
SKEWED = {
    # closers of steps; skews; heartbeats; seconds since the newest step   clocks that are told   fresh heartbeats
    "right clocks": (("01010101", {}, BOTH, 1.0), {}, ["r00", "r01"]),
    "right clocks, one dead": (("01010101", {}, KILLED, 71.0), {}, ["r00"]),
    "one ahead": (("01010101", AHEAD, BOTH, 1.0), {"r00": "2 h 00 min ahead"}, ["r00", "r01"]),
    "one ahead, the other dead": (("01010100", AHEAD, KILLED, 71.0), {"r00": "2 h 00 min ahead"}, ["r00"]),
    "one ahead, which closed all": (("00000000", AHEAD, BOTH, 1.0), {"r00": "2 h 00 min ahead"}, ["r00", "r01"]),
    "one a little ahead": (("01010101", {"r00": 5.0}, BOTH, 1.0), {}, ["r00", "r01"]),
    "one behind, and it closed the newest": (("01010100", BEHIND, BOTH, 1.0), {"r00": "42 min behind"}, ["r01"]),
    "one behind, the other closed it": (("10101011", BEHIND, BOTH, 1.0), {"r00": "45 min behind"}, ["r00", "r01"]),
    "one behind, and the other has ended": (
        ("1100000000", {"r00": -250.0}, ALONE, 1.0),
        {"r00": "2 min 30 s behind"},
        [],
    ),
    "four closers, one behind": (("1320", BEHIND, BOTH, 1.0), {"r00": "43 min behind"}, ["r01"]),
    "the only one, ahead": (("00000000", AHEAD, ALONE, 1.0), {"r00": "2 h 00 min ahead"}, ["r00"]),
    "the only one, right": (("00000000", {}, ALONE, 1.0), {}, ["r00"]),
}


@pytest.mark.parametrize("case", SKEWED)
def test_a_wrong_clock_of_one_replica_changes_no_word_about_another(case: str) -> None:
    """Before: a dead replica "beat 0.0 s" ago by a fast closer's clock, and a slow closer's run was stalled."""
    (closers, skews, beats, open_s), told, fresh = SKEWED[case]
    report, now = skewed(closers, skews, beats, open_s)
    found = find_troubles(report, now)
    clocks = {one.slot: one.text for one in found if one.kind == "clock"}
    assert clocks.keys() == told.keys() and all(text in clocks[slot] for slot, text in told.items())
    rows = session_rows(report, now, {})
    assert [row.slot for row in rows if row.slot in beats and row.phase == "train"] == fresh
    assert not [one for one in found if one.kind == "stalled"]
    if len(set(closers)) < 3:  # else no replica has closed two
        assert overview(report, now).step_s == pytest.approx(GAP_S, abs=GAP_S / 10)


@pytest.mark.parametrize("open_s", [20.0, 3600.0])
@pytest.mark.parametrize("closers", ["01010100", "01010101", "00000000"])
def test_a_closer_with_a_fast_clock_that_was_replaced_hides_no_stall(closers: str, open_s: float) -> None:
    """Before: the open step had lasted -3,600 s, and no trouble named the run that stood."""
    report, now = skewed(closers, AHEAD, BOTH, open_s)
    report.beats["r00"] = Beat("r00", 2, 9, "train", 8, 0, 0.0, now - 0.2)
    seen = overview(report, now).open_s
    is_dated = "1" in closers  # else no commit has a time that can be right
    assert seen is not None and (seen == pytest.approx(open_s, abs=GAP_S / 10) if is_dated else seen == 0.0)
    stalls = [one for one in find_troubles(report, now) if one.kind == "stalled"]
    assert bool(stalls) == (is_dated and open_s > 3 * GAP_S)


class CountedBeats(dict[str, Beat]):
    walks = 0

    def values(self) -> ValuesView[Beat]:
        self.walks += 1
        return super().values()


def test_a_view_walks_over_all_replicas_a_few_times_and_not_once_per_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: with 1,000 replicas, the troubles took a minute and the overview six times as long as without clocks."""
    report, now = skewed("01010101", {}, BOTH, 1.0)
    for slot in (f"r{n:02d}" for n in range(2, 60)):
        report.sessions.append(replace(report.sessions[0], slot=slot))
        report.beats[slot] = replace(report.beats["r00"], slot=slot)
    report.beats = beats = CountedBeats(report.beats)
    slots, asked = Report.slots.fget, list[Report]()
    monkeypatch.setattr(Report, "slots", property(lambda told: asked.append(told) or slots(told)))
    assert not find_troubles(report, now) and len(session_rows(report, now, {})) == 60
    assert len(asked) < 10 and beats.walks < 10


OLDER = "it runs trl 1.15.0, and other replicas run trl 1.16.0"


@pytest.mark.parametrize(("trl", "told"), [("1.15.0", OLDER), ("1.16.0", "")])
def test_a_replica_with_another_version_of_a_library_is_told(trl: str, told: str) -> None:
    """Before: replicas of two platforms trained by two versions of TRL, and no view and no log said so."""
    planted = Planted(4)
    planted.claim("r02", 1, 0.5)
    for slot, version in (("r00", "1.16.0"), ("r01", trl), ("r02", "1.16.0")):
        planted.tell(slot, 1, 0.6, "claimed", versions=f"torch 2.13.0, trl {version}")
    seen = found_in(planted.report()).get("versions")
    assert (seen.slot, seen.text) == ("r01", told) if told else seen is None


def waiting(report: Report, fast_wait_s: float, slow_s: float) -> Report:
    """The same run; r00 trains for 60 s and waits, r01 trains for `slow_s` with as many inner steps."""
    for step in report.steps:
        step.seconds.update(
            r00={"inner_s": 60.0, "offer_s": 1.0, "wait_s": fast_wait_s, "mean_s": 1.0},
            r01={"inner_s": slow_s, "offer_s": 1.0, "wait_s": 1.0, "mean_s": 1.0},
        )
    return report


def test_a_replica_that_waits_for_a_slower_one_is_told_with_its_price() -> None:
    run = Planted(6)
    seen = found_in(waiting(run.report(), 60.0, 120.0), spent=Spending(1.0, 0.5, usd_per_hour=4.0))["waits"]
    assert "r00 waits 49% of its time for r01, whose inner step takes 20 s, where that of r00 takes 10 s" in seen.text
    assert "about $0.98 an hour" in seen.text and "outer.sync_every" in seen.advice
    assert "waits" not in found_in(waiting(run.report(), 15.0, 75.0)), "less than a quarter"
    assert "waits" not in found_in(waiting(run.report(), 60.0, 60.0)), "the store is slow, not a replica"
    assert "waits" not in found_in(run.report())


# -------------------------------------------------------------------- the learning


@pytest.mark.parametrize("same", [{"equal_groups": 1.0, "reward_std": 0.4}, {"reward_std": 0.0}])
def test_groups_with_equal_rewards_in_five_outer_steps_are_no_signal(same: dict[str, float]) -> None:
    learning = {"equal_groups": 0.9, "reward_std": 0.1}
    seen = found_in(Planted(8, lambda t: learning if t < 3 else same).report())["no_signal"]
    assert seen.step == 3 and "equal rewards (mean 0.2) in the newest 5 outer steps" in seen.text
    assert kinds(Planted(8, lambda t: learning if t < 4 else same)) == []
    assert kinds(Planted(8, lambda t: learning if t == 6 else same)) == []


def test_three_zero_means_are_no_signal_and_have_their_cause() -> None:
    run = Planted(6)
    run.tell("r00", 1, 600.0, "nothing_learned", steps=3, cause="the learning rate is 0")
    report = run.report()
    report.steps[4].empty = report.steps[5].empty = True
    assert list(found_in(report)) == []
    report.steps[3].empty = True
    assert "newest 3 outer steps, so nothing was learned; the learning rate is 0" in found_in(report)["no_signal"].text


def drifting(name: str, first: float, later: float, reward: float = 0.9) -> Planted:
    """A metric that scatters a little at first, and goes elsewhere from step 12 on, as the reward does."""
    wobble = lambda t: 1 + 0.02 * (t % 3)  # noqa: E731
    return Planted(
        16,
        lambda t: {name: (later if t >= 12 else first) * wobble(t), "reward": reward if t >= 12 else 0.3 * wobble(t)},
    )


@pytest.mark.parametrize(
    ("name", "first", "later", "near"),
    [
        ("kl", 0.02, 0.4, 0.08),
        ("completion_length", 60.0, 200.0, 110.0),
        ("entropy", 1.2, 0.1, 0.4),
        ("entropy", 0.5, 2.0, 0.9),
    ],
)
def test_a_metric_outside_its_band_while_the_reward_rises_is_told(
    name: str, first: float, later: float, near: float
) -> None:
    seen = found_in(drifting(name, first, later).report())["reward_hacking"]
    assert (
        seen.step == 12 and "the reward rose from 0.306 to 0.9" in seen.text and "outer steps 12 to 15" in seen.advice
    )
    assert kinds(drifting(name, first, near)) == []
    assert kinds(drifting(name, first, later, reward=0.3)) == [], "no reward rose"


def test_a_metric_that_is_back_in_its_band_and_a_run_that_has_just_begun_are_silent() -> None:
    numbers = lambda t: {"entropy": 3.0 if t == 14 else 0.5, "reward": 0.05 * t}  # noqa: E731
    assert kinds(Planted(16, numbers)) == []
    assert kinds(Planted(9, lambda t: {"completion_length": 40.0 * 2**t, "reward": 0.1 * t})) == []


def test_status_reads_the_first_steps_of_a_long_run_for_the_band() -> None:
    """It reads the newest logs alone, so these numbers come from offers."""
    run = Planted(0)
    for t in range(60):
        offers = []
        for slot in ("r00", "r01"):
            listed = run.offer(t, slot, 1, 0.3 if t < 55 else 0.9)
            offer = decode_or_none(Offer, run.store.get(layout.offer_key(t, slot, 0)) or b"")
            assert offer is not None
            stats = {**offer.stats, "kl": 0.01 if t < 55 else 2.0}
            run.store.put(layout.offer_key(t, slot, 0), replace(offer, stats=stats).encode())
            offers.append(listed)
        run.commit(t, GAP_S * (t + 1), offers)
    report = read_report(run.store, STATUS)
    assert {5, 9} <= {s.t for s in report.steps if s.learned} and not report.steps[21].learned
    assert find_troubles(report, T0 + 60 * GAP_S)[0].kind == "reward_hacking"


def test_the_steps_with_suspicious_completions_are_named() -> None:
    report = drifting("kl", 0.02, 0.4).report()
    assert flagged_steps(list(found_in(report).values()), report.head) == range(12, 16)
    assert not flagged_steps([], 16)


def test_learning_that_makes_a_policy_sure_of_itself_is_no_hack() -> None:
    """Entropy, length and reward of SmolLM2-135M in a real run (docs/studies/real-model.md has its like)."""
    entropy = [1.98, 2.153, 1.4, 1.055, 0.828, 0.535, 0.448, 0.329, 0.239, 0.183, 0.119, 0.157, 0.11, 0.09, 0.06]
    length = [9.1, 5.8, 3.3, 3.3, 3.0, 2.9, 2.8, 2.9, 3.0, 2.9, 2.8, 2.9, 2.9, 3.0, 2.9]
    reward = [0.03, 0.02, 0.06, 0.17, 0.22, 0.15, 0.23, 0.3, 0.41, 0.36, 0.33, 0.37, 0.4, 0.44, 0.43]
    run = Planted(15, lambda t: {"entropy": entropy[t], "completion_length": length[t], "reward": reward[t]})
    assert kinds(run) == []


@pytest.mark.parametrize(("name", "kind", "bad", "good"), [
    ("tool_failures", "tool_failures", 0.6, 0.4), ("importance_masked", "masked", 0.2, 0.04),
])  # fmt: skip
def test_a_share_that_stays_too_high_is_told(name: str, kind: str, bad: float, good: float) -> None:
    seen = found_in(Planted(6, lambda t: {name: bad}).report())[kind]
    assert f"{bad:.0%} of the" in seen.text and seen.step == 3
    assert kinds(Planted(6, lambda t: {name: good})) == []
    assert kinds(Planted(2, lambda t: {name: bad})) == []


@pytest.mark.parametrize(("first", "later", "right", "told"), [
    (-40.0, -90.0, 0.98, True),
    (-40.0, -46.0, 0.98, False),  # inside a quarter
    (-40.0, -90.0, 0.5, False),  # the pairs are not ranked right: another trouble
    (-40.0, -20.0, 0.98, False),
])  # fmt: skip
def test_chosen_responses_that_become_unlikely_are_told(first: float, later: float, right: float, told: bool) -> None:
    wobble = lambda t: 1 + 0.02 * (t % 3)  # noqa: E731
    numbers = lambda t: {"replay_chosen_logp": (later if t >= 12 else first) * wobble(t), "replay_accuracy": right}  # noqa: E731
    assert kinds(Planted(16, numbers)) == (["replay_falls"] if told else [])
    if told:
        seen = found_in(Planted(16, numbers).report())["replay_falls"]
        assert "from -40.8 to -91.8" in seen.text and "98% of the pairs" in seen.text and seen.step == 13


def test_completions_that_break_the_reward_are_told_unless_they_become_fewer() -> None:
    rising = Planted(9, lambda t: {"reward_broken": 0.0 if t < 6 else 0.2})
    seen = found_in(rising.report())["reward_broken"]
    assert "20.0% of the completions of the newest 3 outer steps broke the reward, 0.0% at first" in seen.text
    assert seen.step == 6 and kinds(Planted(3, lambda t: {"reward_broken": 0.5})) == ["reward_broken"]
    assert kinds(Planted(9, lambda t: {"reward_broken": 0.5 - 0.05 * t})) == []
    assert kinds(Planted(9, lambda t: {"reward_broken": 0.04 * (t > 5)})) == []


def evaluated(run: Planted, step: int, mean: float, prompts: int = 100) -> None:
    """Log an evaluation with rewards 0 and 1."""
    sums = {"reward": [prompts, mean * prompts, mean * prompts]}
    about = {"step": step, "share": 0, "shares": 1, "prompts": prompts, "total": prompts}
    run.tell("r00", 1, GAP_S * step + 5, "evaluated", **about, greedy=sums)


def test_an_evaluation_that_falls_while_the_training_reward_rises_is_told() -> None:
    run = Planted(12, lambda t: {"reward": 0.05 * t})
    evaluated(run, 4, 0.6)
    evaluated(run, 8, 0.5)
    assert kinds(run) == [], "0.1 is within two standard errors of a difference, 0.139"
    evaluated(run, 12, 0.4)
    seen = found_in(run.report())["overfitting"]
    assert (
        seen.step == 4 and "from 0.600 ± 0.049 to 0.400 ± 0.049 (θ_4 to θ_12)" in seen.text and "--best" in seen.advice
    )
    falls = Planted(12, lambda t: {"reward": 0.9 - 0.05 * t})
    evaluated(falls, 4, 0.6)
    evaluated(falls, 12, 0.4)
    assert kinds(falls) == [], "the training reward fell, too"


@pytest.mark.parametrize(
    ("greedy", "sampled", "said"),
    [
        (1.0, 0.0, "sampling probably takes bad tokens"),
        (0.05, 0.6, "end in a loop"),
        (0.24, 0.2, ""),
        (0.02, 0.0, ""),  # within the errors
    ],
)
def test_greedy_and_sampled_answers_that_differ_strongly_are_told(greedy: float, sampled: float, said: str) -> None:
    run = Planted(4)
    sums = {
        kind: {"reward": [100, 100 * mean, 100 * mean]} for kind, mean in (("greedy", greedy), ("sampled", sampled))
    }
    run.tell("r00", 1, 405.0, "evaluated", step=4, share=0, shares=1, prompts=100, total=100, **sums)
    found = found_in(run.report())
    assert (said in found["held_out_differs"].text) if said else not found
    remark = [line for line in messages.message_lines(run.report(), T0 + 406) if "held out" in line]
    assert bool(remark) == bool(said) and all(line.startswith("! held out @4: greedy") for line in remark)


# -------------------------------------------------------------------- the page


def test_the_page_has_a_section_for_every_trouble_and_no_other() -> None:
    sections = re.findall(r"^## (\w+)$", (ROOT / PAGE).read_text(), re.M)
    assert [s for s in sections if s != "Alerts"] == [*DETECTORS, *messages.HOST_DETECTORS]


def test_a_detector_finds_troubles_of_its_own_kind_and_page() -> None:
    for kind, detector in DETECTORS.items():
        assert detector.__name__ == kind

"""A run's use and gain, and what its replicas' agreement says of another number of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from diloco.runlog.reader import Report, read_report
from diloco.runlog.sessions import SessionSummary
from diloco.runlog.steps import Counted, Decision, Step
from diloco.runlog.summary import summary
from diloco.runlog.worth import RECENT, agreement, resized, worth, worth_dict, worth_words
from executors.cli.looking.status import status_dict, status_table
from executors.cli.watch.words import short_device
from rendezvous.agreement.membership import Wanted
from tests.diloco.test_report import T0, killed_and_replaced


def step(t: int, cosine: float | None, slots: int = 4, reward: float | None = None) -> Step:
    names = tuple(f"r{i:02d}" for i in range(slots))
    found = Step(t, T0 + t, "r00-1", names, (), True, samples=dict.fromkeys(names, 80.0))
    found.numbers = {} if cosine is None else {"cos_pair": cosine}
    found.reward = {} if reward is None else dict.fromkeys(names, reward)
    return found


def report(steps: list[Step], hours: float = 2.0, device: str = "NVIDIA L4") -> Report:
    ended = T0 + 3600 * hours
    sessions = [SessionSummary("r00", 1, 1, "here", T0, ended=ended, how="done", device=device)]
    return Report("mine", "file:///x", {}, Wanted(replicas=4, steps=9), steps, sessions, [], {}, 0)


def best_progress(noise: float, replicas: float) -> float:
    """The expected fall of |x|²/2 in one step of the best length, along s + n/√N with |s| = 1, searched on a grid."""
    lengths = np.linspace(0, 1, 100_001)
    return float((lengths - lengths**2 / 2 * (1 + noise / replicas)).max())


@pytest.mark.parametrize("cosine", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("to", [1, 3, 5, 8])
def test_another_size_is_reckoned_by_the_best_step_on_a_quadratic(cosine: float, to: int) -> None:
    noise = 1 / cosine - 1
    time, hours = resized(4, to, cosine)
    assert time == pytest.approx(best_progress(noise, 4) / best_progress(noise, to), rel=1e-6)
    assert hours == pytest.approx(time * to / 4)


def test_strangers_are_worth_what_they_cost_and_twins_are_worth_nothing() -> None:
    assert resized(4, 8, 1.0) == (1.0, 2.0)
    time, hours = resized(4, 8, -0.3)  # nothing in common
    assert hours == pytest.approx(1.0, abs=0.05) and time == pytest.approx(0.5, abs=0.03)


def test_the_newest_steps_speak_and_one_replica_alone_says_nothing() -> None:
    steps = [step(t, 0.9) for t in range(5)] + [step(5 + t, 0.2, slots=2 + 2 * (t % 2)) for t in range(RECENT)]
    assert agreement(steps) == (pytest.approx(0.2), 3.0)
    assert agreement([step(0, None), step(1, 0.5, slots=1)]) == (None, 0.0)


def test_samples_hours_and_the_gain_of_a_reward() -> None:
    found = worth(report([step(0, 0.5, reward=0.1), step(1, 0.5, reward=0.7)]))
    assert (found.samples, found.hours, found.unit) == (640.0, 2.0, "GPU-hours")
    assert found.gain_per_hour == pytest.approx(0.3)
    assert worth_words(found) == [
        "640 samples in 2 GPU-hours: reward 0.1 → 0.7 (+0.3/GPU-h)",
        "agreement 0.50: 5 replicas ×0.96 time ×1.20 hours, 3 ×1.07 ×0.80 (a guess)",
    ]
    assert json.loads(json.dumps(worth_dict(found)))["resized"]["5"] == {"time": 0.96, "hours": 1.2}


def test_an_hour_of_eight_devices_is_eight_hours() -> None:
    steps = [step(0, 0.5, reward=0.1), step(1, 0.5, reward=0.5)]
    eight = worth(report(steps, hours=2.0, device="8 × NVIDIA H100 80GB HBM3"))
    assert (eight.hours, eight.unit) == (16.0, "GPU-hours") and eight.gain_per_hour == pytest.approx(0.4 / 16)
    assert worth(report(steps, hours=2.0, device="999 × of a forger")).hours == 2.0
    assert short_device("8 × NVIDIA H100 80GB HBM3") == "8 × H100 80GB HBM3"


def test_replicas_that_make_the_same_step_want_a_larger_rate() -> None:
    said = {c: worth_words(worth(report([step(0, c, reward=0.1), step(1, c, reward=0.2)]))) for c in (0.79, 0.94)}
    assert len(said[0.79]) == 2
    assert said[0.94][2] == "replicas step alike: a larger inner.lr does more than another replica"


def test_its_lines_fit_into_80_columns_with_their_indent() -> None:
    found = report([step(t, 0.94, slots=16, reward=0.123 + 0.8 * t / 40) for t in range(40)], hours=123.4, device="cpu")
    lines = worth_words(worth(found))
    assert len(lines) == 3 and max(map(len, lines)) <= 78, lines


def test_a_loss_has_no_gain_and_a_cpu_is_no_gpu() -> None:
    steps = [step(0, None), step(1, None)]
    for one, loss in zip(steps, (4.0, 2.0), strict=True):
        one.learned = {slot: {"loss": loss} for slot in one.fresh}
    found = worth(report(steps, device="cpu"))
    assert found.gain_per_hour is None and worth_dict(found)["resized"] == {}
    assert worth_words(found) == ["640 samples in 2 replica-hours: loss 4 → 2"]


def test_before_the_first_commit_nothing_is_said() -> None:
    assert worth_words(worth(report([]))) == []


def test_a_session_that_runs_is_counted_to_its_newest_heartbeat(tmp_path: Path) -> None:
    seen = read_report(killed_and_replaced().store)
    ended = {x.name: x.ended for x in seen.sessions}
    seconds = (ended["r00-1"] - T0 - 0.5) + (9.2 - 0.5) + (16.0 - 9.6)  # type: ignore[operator]
    assert worth(seen).hours == pytest.approx(seconds / 3600)


def test_status_and_report_say_it() -> None:
    seen = report([step(0, 0.5, reward=0.1), step(1, 0.5, reward=0.7)])
    for shown in ("\n".join(status_table(seen, T0 + 9)), summary(seen)):
        assert (
            "640 samples in 2 GPU-hours" in shown
            and "agreement 0.50: 5 replicas ×0.96 time ×1.20 hours, 3 ×1.07 ×0.80 (a guess)" in shown
        )
    assert status_dict(seen, T0 + 9)["worth"]["samples"] == 640


def test_late_work_is_counted_beside_fresh_work_of_the_same_slot() -> None:
    """Before: it took its place, and samples per second fell."""
    offers = (Counted(5, "r00", 1, "a", samples=100.0), Counted(5, "r01", 1, "b", samples=100.0))
    late = Counted(4, "r01", 1, "c", factor=0.5, samples=7.0)
    found = Step.of_commit(Decision(5, T0, "r00-1", None, (*offers, late), 0), linked=True)
    assert found.samples == {"r00": 100.0, "r01": 107.0} and found.gated == ("r01",)

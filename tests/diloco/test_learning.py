"""Losses where people look: status, report, chart, and a line per outer step in a replica's own output."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from diloco import StoreManager, make_diloco
from diloco.run.config import OuterError
from diloco.runlog.learning import (
    headline_curve,
    learning_numbers,
    learning_words,
    newest_numbers,
    over_replicas,
    step_line,
)
from diloco.runlog.reader import read_report
from diloco.runlog.summary import curve_of, summary
from diloco.views.page.charts import draw_figure
from diloco.views.page.data import page_data
from executors.cli.looking.lines import Lines
from executors.cli.looking.status import status_dict, status_table
from rendezvous.stores.open import open_store
from tests.support.fleet import Fleet


@dataclass
class Step:
    fresh: tuple[str, ...]
    reward: dict[str, float] = field(default_factory=dict)
    learned: dict[str, dict[str, float]] = field(default_factory=dict)


def test_the_curve_is_the_reward_or_else_the_loss_of_those_that_the_step_lists() -> None:
    steps = [
        Step(("r00", "r01"), learned={"r00": {"loss": 4.0}, "r01": {"loss": 2.0}}),
        Step(("r00",), learned={"r00": {"loss": 1.0}, "r01": {"loss": 9.0}}),
        Step(("r01",)),
    ]
    found = headline_curve(steps, ["r00", "r01", "r02"])
    assert found.name == "loss" and found.mean == [3.0, 1.0, None] and found.known == [3.0, 1.0]
    assert found.by_slot == {"r00": [4.0, 1.0, None], "r01": [2.0, 9.0, None]}
    steps[2].reward = {"r01": 0.5}
    assert headline_curve(steps, ["r01"]).name == "reward" and headline_curve(steps, ["r01"]).mean == [None, None, 0.5]
    assert headline_curve([], []).known == []


def test_numbers_are_means_over_replicas_and_missing_rewards_are_added_up() -> None:
    step = Step((), learned={"r00": {"loss": 1.0, "reward_missing": 2.0}, "r01": {"loss": 3.0, "reward_missing": 1.0}})
    assert over_replicas(step) == {"loss": 2.0, "reward_missing": 3.0} and newest_numbers(
        [step, Step(())]
    ) == over_replicas(step)
    assert (
        learning_words({"loss": 2.0, "kl": 0.01, "reward_missing": 3.0})
        == "loss 2 · KL 0.01 · 3 completions without reward"
    )
    assert learning_words({"loss": 2.0, "kl": 0.01}, without="loss") == "KL 0.01"
    assert learning_words({"reward_broken": 0.0, "kl": 0.01}) == "KL 0.01"
    assert learning_words({"reward_broken": 0.125}) == "12.5% of completions broke the reward"
    assert learning_numbers({"loss": 1, "theta": "ab", "kl": None, "grad_norm": 0.5}) == {"loss": 1.0, "grad_norm": 0.5}


def test_a_replicas_line_says_where_it_is_and_what_it_learned() -> None:
    event = {"step": 2, "loss": 4.8251, "lr": 1e-3, "samples": 32.0, "inner_s": 1.25, "wait_s": 0.31, "listed": True}
    text = step_line("r00-1", event, steps=6)
    assert text == "r00-1  outer step 3 of 6  loss 4.825  lr 0.001  32 samples  train 1.2 s  wait 0.3 s"
    assert "not in this step's commit" in step_line("r00-1", {**event, "listed": False}, steps=0)


def test_a_supervised_fleet_shows_its_loss_from_the_first_outer_step(tmp_path: Path) -> None:
    """README's first run, in small."""
    fleet = Fleet(tmp_path, fleet={"steps": 4, "min_replicas": 3})
    fleet.start_all()
    fleet.wait_for(lambda: fleet.commit(0) is not None)
    early = fleet.wait_for(lambda: found if curve_of(found := read_report(open_store(fleet.url))).known else None)
    shown = "\n".join(status_table(early))
    assert "  loss " in shown.splitlines()[0] and "   loss  counted" in shown and "grad norm" in shown
    assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}

    report = read_report(open_store(fleet.url))
    losses = curve_of(report)
    assert losses.name == "loss" and len(losses.known) == 4 and losses.known[-1] < losses.known[0], "it learns"
    assert "mean loss" in summary(report) and "no reward" not in summary(report)
    learning = status_dict(report, report.ended)["learning"]
    assert learning["loss"] == pytest.approx(losses.known[-1]) and learning["grad_norm"] > 0
    for slot in ("r00", "r01", "r02"):
        lines = [x for x in fleet.log(slot).read_text().splitlines() if "outer step" in x]
        assert len(lines) == 4 and lines[0].startswith(f"{slot}-1  outer step 1 of 4  loss "), lines


@pytest.mark.slow
def test_the_chart_draws_the_loss_where_there_is_no_reward(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, fleet={"steps": 3, "replicas": 2})
    fleet.start_all()
    fleet.wait()
    report = read_report(open_store(fleet.url))
    axes = draw_figure(report).axes[0]
    assert axes.get_title(loc="left") == "loss by outer step" and "loss" in axes.get_ylabel()
    drawn = {str(each.get_label()): each.get_ydata() for each in axes.get_lines()}
    assert set(drawn) == {"r00", "r01", "mean"} and list(cast("Any", drawn["mean"])) == pytest.approx(
        curve_of(report).known
    )
    metrics = page_data(report, report.ended)["chunks"][0]["metrics"]
    assert metrics["loss"] == pytest.approx(curve_of(report).known, rel=1e-4) and len(metrics["grad_norm"]) == 3


def test_lines_for_programs_have_the_loss(tmp_path: Path, capsys: Any) -> None:
    import sys

    fleet = Fleet(tmp_path, fleet={"steps": 2, "replicas": 2})
    fleet.start_all()
    fleet.wait()
    Lines(sys.stdout).show(read_report(open_store(fleet.url)))
    lines = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step=")]
    assert len(lines) == 2 and all("loss=" in x and "grad_norm=" in x for x in lines)


# -------------------------------------------------------------------- a loop of the user's own


def train_alone(tmp_path: Path, each: Callable[[Any, torch.Tensor], None], steps: int = 3) -> Path:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = StoreManager(str(tmp_path / "run"), "r00", replicas=1, steps=steps)
    with make_diloco(model, optimizer, manager, sync_every=2) as run:
        while not manager.done:
            optimizer.zero_grad()
            loss = model(torch.ones(8, 4)).square().mean()
            loss.backward()
            each(run, loss)
            optimizer.step()
    return tmp_path / "run"


def test_a_loop_of_ones_own_shows_what_it_logs(tmp_path: Path) -> None:
    seen: list[float] = []

    def each(run: Any, loss: torch.Tensor) -> None:
        seen.append(loss.item())
        run.log(loss=loss, samples=8, accuracy=0.5, broken=math.nan)

    url = train_alone(tmp_path, each)
    report = read_report(open_store(str(url)))
    assert curve_of(report).mean == pytest.approx([(seen[i] + seen[i + 1]) / 2 for i in (0, 2, 4)])
    step = next(e for e in report.of_kind("step"))
    assert step["samples"] == 16 and step["accuracy"] == 0.5 and "broken" not in step
    assert "loss" in status_table(report)[0]


def test_what_a_loop_logs_may_not_hide_what_the_outer_loop_says(tmp_path: Path) -> None:
    with pytest.raises(OuterError, match="log\\(\\) got theta, which the outer loop itself logs"):
        train_alone(tmp_path, lambda run, loss: run.log(theta=1.0))


def test_every_name_that_the_outer_loop_logs_is_refused(tmp_path: Path) -> None:
    from diloco.events import TAKEN

    url = train_alone(tmp_path, lambda run, loss: None)
    step = json.loads(
        next(
            x
            for p in sorted(url.glob("log/r00-1/*.jsonl"))
            for x in p.read_text().splitlines()
            if '"step"' in x and '"theta"' in x
        )
    )
    assert set(step) <= TAKEN, set(step) - TAKEN

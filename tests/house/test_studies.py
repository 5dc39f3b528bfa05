"""The fleet of the studies takes the steps of a real one; their curves, differences and rules are what they say."""

import math
import random
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.model.export import model_record, start_folder, state_at
from diloco.model.fetch import fetch_files
from diloco.replica.replica import REJOIN_WARMUP, share_of
from diloco.run.config import derive_seed
from diloco.run.record import read_run
from inner import InnerLoop, Seeds, build_inner
from inner.rollouts.recording.bundle import Bundle
from inner.rollouts.recording.unpack import unpack
from tests.inner.test_acting import a_loop, sampled
from tests.support.fleet import Fleet
from tests.support.study_trials import count_to_seed

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "studies"))
import channels
import desk
import effective_step
import elastic
import errands
import outer_rules
import overlap
import pretrained
import process
import replicas
import staleness
import tuned
import wall_clock
from fleet import Turn, flat, outer_steps, scripted_steps, with_nesterov
from trials import Trial, area, at_step, first_step, paired, read_rows, run_missing
from worlds import WORLDS

STEPS = 3
ONE_RATE = {"schedule": {"lr_replicas": "constant"}}  # a study's arm says its rate itself
RULES = effective_step.RULES  # fixed, matched, root


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    found = Fleet(
        tmp_path_factory.mktemp("real"), inner=ONE_RATE, fleet={"replicas": 2, "min_replicas": 2, "steps": STEPS}
    )
    found.start_all()
    assert found.wait() == {"r00": [0], "r01": [0]}, found.logs()
    return found


def test_it_has_the_bits_of_a_real_fleet(fleet: Fleet, tmp_path: Path) -> None:
    run = read_run(fleet.url)
    record, outer = model_record(run), run.config.outer
    start = start_folder(run, record, tmp_path / "model")
    files = fetch_files(run, tmp_path / "code")
    seeds = [Seeds(derive_seed(0, s), derive_seed(0, s, 1), 0, share_of(run.config, s)) for s in ("r00", "r01")]
    loops = [build_inner(run.config.inner, start, files, one) for one in seeds]
    thetas = outer_steps(loops, every=outer.sync_every, rate=lambda mean, deltas: float(outer.lr), mu=outer.momentum)
    found = [theta.clone() for theta in islice(thetas, STEPS)]
    thetas.close()
    for t, theta in enumerate(found, 1):
        assert torch.equal(theta, torch.cat(state_at(run, record, t)[1].thetas)), t
    assert not torch.equal(flat(loops[0]), flat(loops[1]))  # each ended where its own inner steps led


@pytest.mark.slow
def test_it_has_the_bits_of_a_real_fleet_whose_machine_is_replaced(tmp_path: Path) -> None:
    """r01 dies with a durable pseudogradient; its replacement begins with an empty Adam and a shorter round."""
    real = Fleet(tmp_path, inner=ONE_RATE, fleet={"replicas": 2, "min_replicas": 2, "steps": 5})
    real.start("r00")
    real.start("r01", die="after:create:/offer/@2").join()
    real.start("r01")
    assert set(real.wait()["r01"]) == {-9, 0}, real.logs()
    run, turns = read_run(real.url), turns_of(real)
    assert {turn.session for found in turns.values() for turn in found} == {1, 2}
    record, outer = model_record(run), run.config.outer
    start, files = start_folder(run, record, tmp_path / "model"), fetch_files(run, tmp_path / "code")

    def build(machine: int, session: int, at: int) -> InnerLoop:
        slot = f"r{machine:02d}"
        seeds = Seeds(derive_seed(0, slot), derive_seed(0, slot, session), at, share_of(run.config, slot))
        return build_inner(run.config.inner, start, files, seeds, warmup_steps=REJOIN_WARMUP if session > 1 else 0)

    script = lambda t: turns.get(t, [])  # noqa: E731
    step = with_nesterov(lambda mean, deltas: float(outer.lr), outer.momentum)
    thetas = scripted_steps(flat(build(0, 1, 0)), build, script, rules=outer.rules, outer=step)
    for t, theta in enumerate(islice(thetas, 5), 1):
        assert torch.equal(theta, torch.cat(state_at(run, record, t)[1].thetas)), t
    thetas.close()


@pytest.mark.slow
def test_overlapped_fragments_have_the_bits_of_a_real_fleet(tmp_path: Path) -> None:
    """Two fragments, τ = 1 and α = ½, with the product's own outer loop in threads."""
    settings = {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}
    real = Fleet(tmp_path, inner=ONE_RATE, outer=settings, fleet={"replicas": 2, "min_replicas": 2, "steps": 4})
    real.start_all()
    assert set(real.wait()["r00"]) == {0}, real.logs()
    run = read_run(real.url)
    record, outer = model_record(run), run.config.outer
    start, files = start_folder(run, record, tmp_path / "model"), fetch_files(run, tmp_path / "code")

    def build(machine: int) -> InnerLoop:
        slot = f"r{machine:02d}"
        seeds = Seeds(derive_seed(0, slot), derive_seed(0, slot, 1), 0, share_of(run.config, slot))
        return build_inner(run.config.inner, start, files, seeds)

    thetas = overlap.fleet_thetas(build, 2, outer, 9)
    for t in range(5):  # an outer step of one fragment every two inner steps, applied one later
        want = torch.cat(state_at(run, record, t)[1].thetas)
        assert torch.equal(thetas[2 * t + (t > 0)], want), t


def turns_of(real: Fleet) -> dict[int, list[Turn]]:
    """The turns that its commits list, by the step at which each began."""
    found: dict[int, list[Turn]] = {}
    for commit in real.commits():
        for o in commit.offers:
            found.setdefault(o.step, []).append(Turn(int(o.slot[1:]), o.h, commit.t, o.generation))
    return {t: sorted(turns, key=lambda turn: turn.machine) for t, turns in found.items()}


def test_an_error_in_a_replica_is_told(fleet: Fleet) -> None:
    class Broken:
        model = torch.nn.Linear(2, 2)

        def train(self, stop: object) -> None:
            raise ValueError("a broken loop")

    with pytest.raises(ValueError, match="a broken loop"):
        next(outer_steps([Broken()], every=2, rate=lambda mean, deltas: 0.7, mu=0.9))  # type: ignore[list-item]


# -------------------------------------------------------------------- curves and differences

CURVE = [(0, 0.0), (10, 1.0), (30, 1.0), (40, 0.5)]


def test_a_curve_as_a_number() -> None:
    assert area(CURVE) == pytest.approx((5 + 20 + 7.5) / 40)
    assert [at_step(CURVE, s) for s in (5, 10, 35, 99)] == [0.5, 1.0, 0.75, 0.5]
    assert first_step(CURVE, 0.8) == pytest.approx(8) and first_step(CURVE, 1.1) is None


def test_paired_differences_are_those_of_a_t_test() -> None:
    """scipy 1.17.1: ttest_rel(a, b).confidence_interval(), two-sided and each side alone, at 95 %."""
    a = [5.1, 4.9, 6.2, 5.8, 5.5, 6.0, 5.3, 5.9]
    b = [4.8, 5.0, 5.6, 5.1, 5.4, 5.7, 5.2, 5.1]
    found = paired(a, b)
    assert found.mean == pytest.approx(0.35)
    assert found.half_width == pytest.approx((0.6181232 - 0.0818768) / 2, rel=1e-3)
    assert (found.lower, found.upper) == pytest.approx((0.1351750, 0.5648250), rel=1e-3)


def test_a_trial_runs_once_and_a_study_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    with pytest.raises(ValueError, match="a broken trial"):
        run_missing([Trial("a", 3), Trial("broken", 3)], count_to_seed, path, workers=1)
    before = path.read_text()
    rows = run_missing([Trial("a", 3), Trial("a", 4)], count_to_seed, path, workers=1)
    assert path.read_text().startswith(before) and len(read_rows(path)) == 2
    assert [(row["arm"], row["seed"], row["curve"][-1]) for row in rows] == [("a", 3, [1, 3.0]), ("a", 4, [1, 4.0])]


# -------------------------------------------------------------------- unequal machines


def lives(arm: str, seed: int = 3) -> list[list[Turn | None]]:
    of = range(elastic.MACHINES)
    return [elastic.life(elastic.ARMS[arm], machine, random.Random(f"{seed} {machine}")) for machine in of]


def test_a_slow_machine_is_late_makes_fewer_steps_or_is_not_heard() -> None:
    assert all(life == [Turn(m, 5, t) for t in range(16)] for m, life in enumerate(lives("equal")))
    slow = {arm: lives(f"slow-{arm}")[-1] for arm in ("by-speed", "late", "unheard")}
    assert slow["by-speed"] == [Turn(3, 2, t) for t in range(16)]
    assert slow["late"][:4] == [Turn(3, 5, 1), None, Turn(3, 5, 3), None]
    assert {turn.counts for turn in slow["unheard"] if turn} == {None}
    assert lives("slow-late")[:3] == lives("equal")[:3]


def test_a_machine_that_dies_misses_the_next_round_and_comes_back_as_another_session() -> None:
    for life, told in zip(lives("spot-5"), lives("notice-5"), strict=True):
        lost = [t for t, turn in enumerate(life) if turn is not None and turn.counts is None]
        assert lost == [t for t, turn in enumerate(told) if turn is not None and turn.h == elastic.SHORT]
        assert [t for t, turn in enumerate(life) if turn is None] == [t + 1 for t in lost if t < 15]
        sessions = [turn.session for turn in life if turn is not None]
        assert sessions == sorted(sessions) and sessions[-1] in (len(lost), len(lost) + 1)
    assert sum(turn is None for life in lives("spot-5") for turn in life) > 3


def test_a_curve_at_half_its_pace() -> None:
    assert elastic.slowed([(0, 0.0), (5, 1.0), (10, 3.0)]) == [(0, 0.0), (10, 1.0)]
    assert elastic.slowed([(0, 0.0), (4, 1.0), (8, 3.0), (10, 5.0)]) == [(0, 0.0), (8, 1.0), (10, 1.5)]


# -------------------------------------------------------------------- the studies themselves, in small


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(effective_step, "STEPS", 10)
    WORLDS["text"].prepare(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_all_arms_take_the_same_samples_and_begin_at_the_same_model(small: Path) -> None:
    curves = {
        arm: replicas.run(replace(WORLDS["text"], steps=32), small, Trial(arm, 7))
        for arm in ("alone", "linked-4", "fleet-2-5")
    }
    assert {arm: curve[-1][0] for arm, curve in curves.items()} == {"alone": 32, "linked-4": 8, "fleet-2-5": 15}
    assert len({curve[0] for curve in curves.values()}) == 1
    assert all(curve[-1][1] < curve[0][1] for curve in curves.values())


@pytest.mark.slow
def test_the_root_rule_goes_further_where_replicas_disagree(small: Path) -> None:
    agreeing, strangers = torch.ones(4), torch.eye(4)
    assert effective_step.disagreement(agreeing, [agreeing] * 4) == 1
    assert effective_step.disagreement(strangers.mean(0), list(strangers)) == pytest.approx(2)  # √N
    rates = {
        rule: effective_step.rate_of(rule, 0.5, 4)(strangers.mean(0), list(strangers)) for rule in ("matched", "root")
    }
    assert rates["root"] == pytest.approx(rates["matched"] * 2**0.5)
    ends = {rule: effective_step.run(small, Trial(f"{rule} μ=0.5 H=5", 7))[-1][1] for rule in RULES}
    assert len(set(ends.values())) == 3


def test_each_arm_is_searched_over_ten_settings_and_the_best_mean_of_a_run_is_chosen() -> None:
    arms = tuned.tunings()
    assert {len(named) for named in arms.values()} == {10} and len(arms) == 13
    assert len({name for named in arms.values() for name, _ in named} | set(tuned.rules())) == 130 + 54
    rows = [{"arm": name, "seed": s, "curve": [(0, 0.0), (10, abs(i - 4) + s / 1000)]}
            for i, (name, _) in enumerate(arms["fleet-4-5"]) for s in tuned.TUNED_ON]  # fmt: skip
    assert tuned.choose(WORLDS["text"], rows) == {"fleet-4-5": "fleet-4-5 x16 0.7/0.5"}
    assert tuned.choose(WORLDS["toolworld"], rows) == {"fleet-4-5": "fleet-4-5 x16 1/0"}
    assert "at the grid's edge" in tuned.tuning_table(WORLDS["text"], rows)


def test_the_rules_step_as_far_as_they_say() -> None:
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])
    mean = (a + b) / 2
    assert [tuned.by_disagreement(p)(2)(mean, [a, b]) for p in (1.0, 2.0)] == pytest.approx([2**0.5, 2.0])
    assert tuned.by_disagreement(2.0)(2)(a / 4, [a, a / 4]) == 2.0, "N at most"
    scales = {name: setting.scale for name, setting in tuned.rules().items()}
    assert scales["fleet-4-5 sqrt"] == 2.0 and scales["fleet-8-20 times-plain"] == 8.0


ROWS = Path(__file__).parents[2] / "docs" / "studies" / "rows"
PAGE = (ROWS.parent / "replicas.md").read_text()


@pytest.mark.parametrize("world", ["toolworld", "text"])
def test_the_pages_tables_are_those_of_the_rows(world: str) -> None:
    rows = read_rows(ROWS / f"{world}.jsonl")
    assert {(row["arm"], row["seed"]) for row in rows} == {(arm, s) for arm in replicas.ARMS for s in replicas.SEEDS}
    assert replicas.table(WORLDS[world], rows) in PAGE and replicas.comparisons(WORLDS[world], rows) in PAGE


def test_the_pages_tables_of_the_effective_step_are_those_of_the_rows() -> None:
    rows = read_rows(ROWS / "effective-step.jsonl")
    assert len(rows) == len(effective_step.ARMS) * 8
    assert effective_step.table(rows) in PAGE and effective_step.comparisons(rows) in PAGE


def test_what_was_run_after_the_fact_is_marked_so_and_is_no_arm_of_the_study() -> None:
    later = read_rows(ROWS / "later.jsonl")
    assert {row["arm"] for row in later} <= set(replicas.LATER) and not set(replicas.LATER) & set(replicas.ARMS)
    told = replicas.comparisons(WORLDS["toolworld"], [*read_rows(ROWS / "toolworld.jsonl"), *later]).splitlines()
    assert all(line in PAGE.partition("after the fact\n")[2] for line in told if "-mu −" in line)


def test_the_process_rewards_page_has_the_tables_of_its_rows() -> None:
    rows, page = read_rows(ROWS / "process.jsonl"), (ROWS.parent / "process.md").read_text()
    assert {(row["arm"], row["seed"]) for row in rows} == {(arm, s) for arm in process.ARMS for s in process.SEEDS}
    assert process.table(rows) in page and process.comparisons(rows) in page


def test_the_page_of_channels_has_the_tables_of_its_rows() -> None:
    rows, page = read_rows(ROWS / "channels.jsonl"), (ROWS.parent / "channels.md").read_text()
    arms = channels.ARMS | channels.LATER
    assert {(row["arm"], row["seed"]) for row in rows} == {(arm, seed) for arm in arms for seed in range(5)}
    assert channels.table(rows) in page and channels.hypotheses(rows) in page


def test_no_study_puts_the_examples_on_the_path_whose_folders_have_names_of_packages() -> None:
    assert str(Path(channels.__file__).parents[1]) not in sys.path  # examples/verl would be found where verl is not


def test_the_desk_knows_one_word_for_a_kind_and_its_hint_names_it() -> None:
    row = desk.rows(1, 0, desk.TRAINED)[0]
    here, right = desk.Desk(), desk.RIGHT[row["kind"]]
    here.reset(**row)
    for word in desk.WORDS:
        if word != right:
            with pytest.raises(ValueError, match=f"^Unknown action '{word}'.$"):
                here.desk(word, str(row["order"]))
    with pytest.raises(ValueError, match=r"^No order 9\.$"):
        here.desk(right, "9")
    assert here.get_reward() == 0
    assert here.desk(right, str(row["order"])) == desk.ticket(row["order"]) and here.get_reward() == 1
    assert desk.hint(row, "Unknown action 'x'.") == f"Use the action {right}." and desk.hint(row, "No order 9.") is None
    assert not {asked(row) for row in desk.rows(99, 0, desk.TRAINED)} & {
        asked(r) for r in desk.rows(99, 0, desk.HELD_OUT)
    }


def asked(row: dict[str, Any]) -> str:
    return row["prompt"][0]["content"]


def test_the_desks_scripted_teachers_are_right_four_times_in_five() -> None:
    def said(name: str, row: dict[str, Any]) -> bool:
        answer = channels.scripted(name, {"messages": row["prompt"]})
        return answer == f"call desk action={desk.RIGHT[row['kind']]} order={row['order']}"

    rows = desk.rows(480, 0, desk.TRAINED)
    first, second = ([said(f"scripted-{n}", row) for row in rows] for n in range(2))
    assert all(0.75 < sum(right) / len(rows) < 0.85 for right in (first, second)) and first != second


@pytest.mark.parametrize("world", ["text", "toolworld"])
def test_the_page_of_tuned_rates_has_the_tables_of_its_rows(world: str) -> None:
    tuning, judging = (read_rows(ROWS / f"tuned-{world}-{part}.jsonl") for part in ("tuning", "judging"))
    assert (len(tuning), len(judging)) == (260, (67 + (world == "toolworld")) * 8)
    page, here = (ROWS.parent / "tuned.md").read_text(), WORLDS[world]
    assert tuned.tuning_table(here, tuning) in page
    assert tuned.judging_table(here, judging, tuned.choose(here, tuning)) in page
    judged = {name: read_rows(ROWS / f"tuned-{name}-judging.jsonl") for name in tuned.NO_WORSE}
    assert tuned.decision_table(judged) in page
    assert wall_clock.table(here, tuning, judging) in page
    assert wall_clock.agreement_table({name: judged[name] for name in ("text", "toolworld")}) in page


@pytest.mark.parametrize("world", ["text", "toolworld"])
def test_the_page_of_unequal_machines_has_the_table_of_its_rows(world: str) -> None:
    here = WORLDS[world]
    elastic_rows = read_rows(ROWS / f"elastic-{world}.jsonl")
    assert {(row["arm"], row["seed"]) for row in elastic_rows} == {(a, s) for a in elastic.ARMS for s in elastic.SEEDS}
    assert elastic.table(here, elastic_rows) in (ROWS.parent / "elastic.md").read_text()


def test_the_page_of_unequal_machines_has_the_table_at_the_default_rate() -> None:
    rows = read_rows(ROWS / "elastic-toolworld-default.jsonl")
    assert {(r["arm"], r["seed"]) for r in rows} == {(a, s) for a in elastic.ARMS for s in elastic.DEFAULT_SEEDS}
    assert elastic.table(WORLDS["toolworld"], rows) in (ROWS.parent / "elastic.md").read_text()


@pytest.mark.parametrize("world", ["text", "toolworld"])
def test_the_page_of_a_slow_link_has_the_table_of_its_rows(world: str) -> None:
    rows = read_rows(ROWS / f"overlap-{world}.jsonl")
    assert {(r["arm"], r["seed"]) for r in rows} == {(arm, s) for arm in overlap.ARMS for s in overlap.SEEDS}
    assert overlap.table(WORLDS[world], rows) in (ROWS.parent / "overlap.md").read_text()


def test_all_ways_of_stepping_take_the_same_inner_steps_and_the_plain_one_is_a_mean() -> None:
    assert {sum(arm.rounds) for arm in outer_rules.ARMS.values()} == {outer_rules.STEPS}
    theta, mean = torch.ones(3), torch.tensor([0.5, 0.0, -1.0])
    assert torch.equal(outer_rules.plain()(theta.clone(), mean, []), theta - mean)


def test_momentum_is_dropped_where_it_points_against_the_mean() -> None:
    step, theta, mean = outer_rules.restarting(lr=1.0, mu=0.5), torch.zeros(2), torch.tensor([1.0, 0.0])
    step(theta, mean, [])  # m = 1, step 1.5
    assert torch.equal(theta, torch.tensor([-1.5, 0.0]))
    step(theta, -mean, [])  # dropped: m = −1, step −1.5
    assert torch.equal(theta, torch.zeros(2))
    step(theta, -mean, [])  # kept: m = −1.5, step −1.75
    assert torch.equal(theta, torch.tensor([1.75, 0.0]))


def test_an_averaged_path_is_valued_where_its_mean_is() -> None:
    step, theta = outer_rules.averaging(), torch.zeros(1)
    assert float(step(theta, torch.tensor([-4.0]), [])) == 2.0 and float(theta) == 3.0  # z = 4, x = 2, y = 3
    assert float(step(theta, torch.tensor([-4.0]), [])) == 5.0 and float(theta) == 6.5  # z = 8, x = 5


def test_a_pretrained_fleet_is_judged_at_what_was_chosen_and_at_its_default() -> None:
    rows = [{"arm": name, "seed": 104, "curve": [[0, 0.0], [20, i]]} for i, name in enumerate(pretrained.tunings())]
    chosen = pretrained.choose(rows[:7])  # the default's row is missing: it cannot be chosen
    named = {kind: pretrained.name_of(one) for kind, one in chosen.items()}
    assert named == {"alone": "alone x4", "fleet": "fleet-4-5 x4"}
    on_sums = pretrained.judged(chosen, "sums")
    assert list(on_sums) == ["alone x4", "fleet-4-5 x4", "fleet-4-5 x1 default", "fleet-2-5 x2.83", "fleet-8-5 x5.66"]
    assert list(pretrained.judged(chosen, "products")) == list(on_sums)[:3]


@pytest.mark.parametrize("world", ["text", "toolworld"])
def test_the_page_of_other_rules_has_the_table_of_its_rows(world: str) -> None:
    rows = read_rows(ROWS / f"outer-rules-{world}.jsonl")
    assert {(r["arm"], r["seed"]) for r in rows} == {(arm, s) for arm in outer_rules.ARMS for s in outer_rules.SEEDS}
    assert outer_rules.table(WORLDS[world], rows) in (ROWS.parent / "outer-rules.md").read_text()


def test_a_rule_is_decided_by_its_bound_at_four_replicas_and_by_its_worst_other_cell() -> None:
    def rows(of: dict[str, float]) -> list[dict[str, object]]:
        """Losses, and rewards alike: `of` a rule at N = 4, H = 5 and in the other cells."""
        return [
            {"arm": f"fleet-{n}-{h} {rule}", "seed": s, "curve": [[0, v + s / 100], [9, v + s / 100]]}
            for n in (2, 4, 8) for h in (5, 20) for s in range(8)
            for rule in tuned.RULES
            for v in [of.get(rule, 1.0) if (n, h) == (4, 5) else of.get(f"{rule} else", 1.0)]
        ]  # fmt: skip

    same = rows({"sqrt": 0.5, "times": 0.5, "times else": 1.02})  # smaller: better for a loss
    lines = tuned.decision_table({"text": same}).splitlines()
    told = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in lines[2:]}
    assert (told["sqrt"][2], told["sqrt"][4]) == ("yes", "yes"), "better at N = 4, H = 5, alike elsewhere"
    assert (told["times"][2], told["times"][4]) == ("yes", "no") and told["times"][3].startswith("-2.0, text")
    assert (told["norm"][2], told["norm"][4]) == ("no", "yes")
    assert tuned.gain("toolworld", same, 4, 5, "sqrt").mean == pytest.approx(-0.5), "more is better there"


# -------------------------------------------------------------------- old rollouts


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    """Of the weights that will train on it."""
    ((_, body),) = sampled().bodies.items()
    return unpack(body)


def likelier(bundle: Bundle, factor: float, tokens: int) -> Bundle:
    """The bundle as if its sampler had given each rollout's first tokens a `factor` times smaller probability."""
    assert bundle.logprobs is not None
    shifted = [[x - math.log(factor) * (i < tokens) for i, x in enumerate(row)] for row in bundle.logprobs]
    return replace(bundle, logprobs=shifted)


def grad_norm(correction: str, bundle: Bundle) -> float:
    """Of one inner step on a bundle, in a study's arm of this correction."""
    return stepped(staleness.Arm(0, correction), bundle)[1]["grad_norm"]


def stepped(arm: staleness.Arm, bundle: Bundle) -> tuple[list[int], dict[str, float]]:
    """The generations that the guard passed over, and the metrics of one inner step."""
    loop, handed = a_loop(), staleness.Handed(arm, measures=True)
    handed.join(loop)
    handed.bundles[0] = bundle
    loop.train(lambda: True)
    assert not handed.bundles and len(handed.drifts) == 1
    return handed.passed, loop.pop_metrics()


@pytest.fixture(scope="module")
def plain(bundle: Bundle) -> float:
    return grad_norm("off", bundle)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("correction", "factor", "tokens", "counts"),
    [("off", 4.0, 99, 1), ("token", 1.5, 99, 1.5), ("token", 4.0, 99, 2), ("sequence", 2.5, 1, 2.5),
     ("sequence", 0.5, 1, 0.5), ("sequence", 1.5, 2, 2.25), ("sequence", 4.0, 1, 0)],
)  # fmt: skip
def test_each_correction_weighs_the_loss_as_the_page_says(
    correction: str, factor: float, tokens: int, counts: float, bundle: Bundle, plain: float
) -> None:
    """Beyond the guard's limit, too: it is off."""
    found = grad_norm(correction, likelier(bundle, factor, tokens))
    assert plain > 0 and found == pytest.approx(counts * plain, rel=2e-3, abs=1e-6)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("factor", "passed"), [(1.15, []), (1.3, [0])])
def test_the_guard_passes_over_a_bundle_of_distant_weights_and_the_replica_samples(
    factor: float, passed: list[int], bundle: Bundle
) -> None:
    """log 1.15 is .14 nats per token, and log 1.3 is .26."""
    found, metrics = stepped(staleness.Arm(0, "token", guarded=True), likelier(bundle, factor, 99))
    assert found == passed and ("importance_ratio" in metrics) is not bool(passed)


def test_an_errand_counts_if_its_four_words_are_right_and_in_their_places() -> None:
    world = errands.Errands(kinds=4, names=8)
    lines = world.rows(1)[0]["lines"]
    said = lambda *some: [{"role": "assistant", "content": " ".join(some)}]  # noqa: E731
    assert len(lines) == errands.ERRANDS and all(len(one.split()) == 4 for one in lines)
    wrong = lines[1].rpartition(" ")[0] + " t9_9"
    cases = [said(*lines), said(lines[0], wrong, *lines[2:]), said(*lines[:3]), said(lines[0], "use", *lines[1:])]
    assert errands.errands_done(cases, [lines] * 4) == pytest.approx([1, 11 / 12, 3 / 12, 1 / 12])


def test_one_sampling_for_a_fleet_is_cut_into_each_replicas_generations(bundle: Bundle) -> None:
    parts = [staleness.part(bundle, i, 4) for i in range(0, len(bundle.ids), 4)]
    assert [ids for one in parts for ids in one.ids] == list(bundle.ids)
    assert torch.equal(torch.cat([one.rewards for one in parts]), bundle.rewards)
    assert all(len(one.prompts) == len(one.logprobs or []) == len(one.mask or []) == 4 for one in parts)


def test_a_trial_is_warned_if_its_drift_passed_the_limit_before_it_fell() -> None:
    row = {"curve": [(0, 0.1), (8, 0.9), (16, 0.4), (48, 0.0), (64, 0.0)], "drift": [0.1, 0.1, 0.1, 0.3, 0.9]}
    assert staleness.is_warned(row) and staleness.is_collapsed(row)
    assert not staleness.is_warned({**row, "drift": [0.1, 0.1, 0.1, 0.1, 0.9]}), "at inner step 16 it had fallen"


def test_the_page_of_old_rollouts_has_the_tables_of_its_rows() -> None:
    rows, page = read_rows(ROWS / "staleness.jsonl"), (ROWS.parent / "staleness.md").read_text()
    assert {(r["arm"], r["seed"]) for r in rows} == {(arm, s) for arm in staleness.ARMS for s in staleness.SEEDS}
    assert all(of(rows) in page for of in (staleness.table, staleness.comparisons, staleness.guard))


def test_the_page_of_old_long_rollouts_has_the_tables_and_the_decision_of_its_rows() -> None:
    rows, page = read_rows(ROWS / "staleness-errands.jsonl"), (ROWS.parent / "staleness-2.md").read_text()
    arms = [
        arm for arm in staleness.LONG_ARMS if not arm.startswith("S2")
    ]  # no time was left for these, nor for an eighth seed
    assert {(r["arm"], r["seed"]) for r in rows} == {(arm, s) for arm in arms for s in range(7)}
    told = staleness.table, staleness.comparisons, staleness.guard, staleness.passed
    assert all(of(rows) in page for of in told)
    assert staleness.decision(read_rows(ROWS / "staleness.jsonl"), rows) in page

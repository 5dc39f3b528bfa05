"""The data of a run's page, and the page frozen into one file."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from diloco.events import event_text
from diloco.runlog.reader import Report, read_report
from diloco.views.page.data import CHUNK, Beside, brief, chunks_of, contribution_rows, json_bytes, page_data
from diloco.views.page.freeze import SCRIPTS, STYLES, asset_text, content_policy, frozen_page, live_page, write_frozen
from diloco.views.page.rollouts import RolloutEnds, read_rollouts
from rendezvous import layout
from tests.diloco.test_report import T0, Bucket, killed_and_replaced
from tests.support.fakes import FaultyStore
from tests.support.page_runs import EVIL, BusyRun, busy_run


@pytest.fixture(scope="module")
def busy() -> BusyRun:
    """12 outer steps of 3 replicas.  Read only."""
    return busy_run(12, 3)


@pytest.fixture(scope="module")
def report(busy: BusyRun) -> Report:
    return read_report(busy.store)


def data_in(page: bytes) -> dict:
    """The data that a browser finds in the page's <script type="application/json">."""
    (found,) = re.findall(rb'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found)


# -------------------------------------------------------------------- the data


def test_the_head_has_what_a_person_asks_first(report: Report) -> None:
    head = page_data(report, report.last_sign + 3)["head"]
    assert (head["name"], head["state"], head["step"], head["steps"]) == ("gsm8k-3x12", "running", 12, 13)
    assert head["parent"] == "s3://bucket/first@40" and "parent" not in head["config"]
    assert head["step_s"] == pytest.approx(43.2) and head["slots"] == ["r00", "r01", "r02"]
    assert len(head["evaluations"]) == 13 and head["evaluations"][0]["greedy"]["reward"]["error"] > 0
    assert {mark["kind"] for mark in head["marks"]} == {"lost", "joined"}
    assert [check["ok"] for check in head["checks"]] == [True, True, True]


def test_the_first_tile_is_the_result_and_the_model_is_named(report: Report) -> None:
    """Held out where it was evaluated twice, else what the replicas saw; an odd config has no words."""
    now = report.last_sign + 3
    result = page_data(report, now)["head"]["result"]
    held = [one.headline[1].mean for one in report.evaluations]
    assert result["name"] == "held-out reward" and result["error"] > 0
    assert (result["first"], result["last"]) == pytest.approx((held[0], held[-1]), rel=1e-4)
    seen = replace(report, events=[e for e in report.events if e["event"] != "evaluated"])
    assert page_data(seen, now)["head"]["result"]["name"] == "reward, in training"
    inner = {
        "model": "a/model",
        "lora": {"r": 8},
        "data": {"prompts": "p.jsonl"},
        "loop": "grpo",
        "rewards": {"function": "r.py:f"},
    }
    named = replace(report, config={**report.config, "inner": inner})
    assert page_data(named, now)["head"]["about"] == "a/model · LoRA r = 8 · p.jsonl · r.py:f · GRPO"
    assert page_data(replace(report, config={"inner": 7}), now)["head"]["about"] == ""


def test_a_chunk_has_every_column_for_each_of_its_steps(report: Report) -> None:
    (chunk,) = chunks_of(report)
    assert chunk["first"] == 0 and len(chunk["at"]) == len(chunk["by"]) == len(chunk["who"]) == 12
    assert {"reward", "loss", "kl", "entropy", "completion_length", "grad_norm"} <= set(chunk["metrics"])
    assert {"rho", "effective_step", "cos_pair", "mean_norm", "outer_lr"} == set(chunk["numbers"])
    columns = [*chunk["metrics"].values(), *chunk["numbers"].values(), *chunk["by_slot"].values(), chunk["up"]]
    assert {len(column) for column in columns} == {12}


def test_chunks_are_dense_and_only_what_changed_has_another_version() -> None:
    run = busy_run(2 * CHUNK + 7, 2)
    before = page_data(read_report(run.store), T0)
    assert [chunk["first"] for chunk in before["chunks"]] == [0, CHUNK, 2 * CHUNK]
    run.step(2 * CHUNK + 7)
    after = page_data(read_report(run.store), T0)["head"]["chunks"]
    assert after[:2] == before["head"]["chunks"][:2] and after[2] != before["head"]["chunks"][2]


def test_a_letter_per_slot_tells_contributions() -> None:
    report = read_report(killed_and_replaced().store)
    assert contribution_rows(report, ["r00", "r01"]) == ["ff", "ff", "fl", "f.", "ff", "ff"]
    head = page_data(report, T0)["head"]
    assert head["counted"]["r01"] == {"fresh": 4, "gated": 0, "late": 1, "lost": 0}


def test_work_that_no_commit_lists_waits_and_then_is_lost() -> None:
    b = Bucket(steps=9)
    for slot in ("r00", "r01"):
        b.claim(slot, 1, 0.1)
        b.tell(slot, 1, 0.2, "joined", step=0)
    for t in range(5):
        b.commit(t, 2.0 + 2 * t, [b.offer(t, slot, 1, 0.1) for slot in ("r00", "r01")[: 1 if t in (1, 4) else 2]])
    assert [row[1] for row in contribution_rows(read_report(b.store), ["r00", "r01"])] == ["f", "x", "f", "f", "w"]


def test_a_gated_replica_has_a_letter_of_its_own() -> None:
    b = Bucket(steps=1)
    b.commit(0, 2.0, [b.offer(0, "r00", 1, 0.1), replace(b.offer(0, "r01", 1, 0.1), factor=0.01)])
    assert contribution_rows(read_report(b.store), ["r00", "r01"]) == ["fg"]


def test_an_outer_step_of_64_replicas_takes_two_kilobytes() -> None:
    (chunk,) = chunks_of(read_report(busy_run(10, 64).store))
    assert len(json_bytes(chunk)) < 10 * 2000 + 2000


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_what_is_no_number_is_null(value: float | None) -> None:
    assert brief(value) is None and brief(1 / 3) == 0.33333 and brief(123456789.123) == 123456789.1


def test_rewards_that_are_no_numbers_do_not_break_the_page() -> None:
    b = Bucket(steps=2)
    b.claim("r00", 1, 0.5)
    b.commit(0, 2.0, [b.offer(0, "r00", 1, 0.5)])
    b.tell("r00", 1, 3.0, "step", step=0, loss=float("nan"), rho=float("inf"), kl=1e400)
    assert data_in(frozen_page(page_data(read_report(b.store), T0)))["chunks"][0]["metrics"]["reward"] == [0.5]


def test_events_have_explanations_and_the_newest_comes_first(report: Report) -> None:
    head = page_data(report, T0)["head"]
    times = [event["at"] for event in head["events"]]
    assert times == sorted(times, reverse=True) and {e["kind"] for e in head["events"]} <= set(head["explanations"])
    assert any(event["loud"] and event["kind"] == "nothing_learned" for event in head["events"])
    assert event_text({"at": 1, "event": "healed", "snapshot": 3, "replayed": 2}) == "snapshot 3, replayed 2"


# -------------------------------------------------------------------- rollouts


def test_rollouts_of_the_first_and_the_newest_steps(busy: BusyRun, report: Report) -> None:
    store = FaultyStore(busy.store)
    ends = RolloutEnds(store)
    ends.read(report)
    assert {sample["step"] for sample in ends.early} == {0} and {s["slot"] for s in ends.early} == {"r00", "r01"}
    assert {sample["step"] for sample in ends.late} <= {5, 10} and 10 in {s["step"] for s in ends.late}
    assert ends.early[0]["reward"] == 0.0 and [t["role"] for t in ends.early[0]["turns"]] == ["user", "assistant"]
    asked = len(store.calls)
    ends.read(report)
    assert len(store.calls) - asked <= 2 and not [key for verb, key in store.calls if verb == "list"]


def test_a_turn_that_failed_has_the_hint_of_the_templates_before_it() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    error = json.dumps({"error": "Tool add not found."})
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": error},
    ]
    tools = {"": [{"type": "function", "function": {"name": "plus", "parameters": {}}}]}
    rows = [
        {"step": 3, "tools": tools},
        {"messages": messages, "first": 1, "reward": 0, "environment": None, "unsure": {}},
    ]
    (sample,) = read_rollouts("\n".join(map(json.dumps, rows)).encode(), "r00")
    assert [turn["role"] for turn in sample["turns"]] == ["user", "hint", "assistant", "tool"]
    assert sample["turns"][1]["text"] == "The tool add does not exist. Available tools: plus."


@pytest.mark.parametrize("body", [b"", b"{}", b"\xff\xfe", b'{"step": 1}\n[]\n{"messages": 3}\nnull\n{"mess', b"[[[["])
def test_rollouts_that_are_none_are_passed_over(body: bytes) -> None:
    assert read_rollouts(body, "r00") == []


# -------------------------------------------------------------------- the file


class Tags(HTMLParser):
    """Every element, and every attribute that could load something."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.loaded = list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]


def tags_of(page: bytes) -> Tags:
    found = Tags()
    found.feed(page.decode())
    return found


def test_the_frozen_page_asks_nobody_for_anything(tmp_path, report: Report) -> None:
    page = write_frozen(page_data(report, T0), tmp_path / "new").read_bytes()
    for _ in range(2):  # it was a folder of that name
        own = write_frozen(page_data(report, T0), tmp_path / "mine" / "run.html")
    assert own == tmp_path / "mine" / "run.html" and own.read_bytes() == page
    assert all(target.startswith("#") or target == "data:," for target in tags_of(page).loaded)
    assert b"connect-src 'none'" in page and b"default-src 'none'" in page
    without_data = re.sub(rb'id="data">.*?</script>', b"", page, flags=re.S)
    assert not re.search(rb"https?://|//cdn|@import|url\(", without_data)
    assert b"Copyright (c) 2022 Leon Sorokin" in page


def test_a_rollout_of_html_is_data_and_nothing_else(busy: BusyRun, report: Report) -> None:
    ends = RolloutEnds(busy.store)
    ends.read(report)
    evil = replace(report, name=EVIL, url=f"s3://{EVIL}", config={**report.config, "name": EVIL, EVIL: [EVIL]})
    data = page_data(evil, T0, Beside(early=ends.early, late=ends.late))
    page = frozen_page(data)
    plain = tags_of(frozen_page(page_data(read_report(Bucket().store), T0)))
    assert tags_of(page).tags == plain.tags, "no element of the page is made by a text of the run"
    assert data_in(page) == json.loads(json_bytes(data))
    assert any(EVIL in turn["text"] for sample in data_in(page)["head"]["early"] for turn in sample["turns"])
    assert not set(json_bytes(data)) & set(b"<>&")


def test_the_policy_names_the_digest_of_every_script_and_style_that_the_page_has() -> None:
    import base64
    import hashlib

    page = live_page("x").decode()
    inside = re.findall(r"<(?:script|style)>(.*?)</(?:script|style)>", page, re.S)
    assert len(inside) == len(SCRIPTS) + len(STYLES)
    for text in inside:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in content_policy()
    assert "unsafe" not in content_policy() and "connect-src 'self'" in page


def test_our_own_scripts_make_no_element_of_a_text() -> None:
    parses = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function")
    assert not [name for name in SCRIPTS if not name.startswith("vendor/") and parses.search(asset_text(name))]


def test_every_asset_is_in_the_page_and_small_enough_to_read() -> None:
    from importlib.resources import files

    folder = files("diloco.views.page").joinpath("assets")
    own = {entry.name for entry in folder.iterdir() if entry.is_file()}
    assert own == {name for name in (*SCRIPTS, *STYLES) if "/" not in name} | {"page.html"}
    assert all(len(asset_text(name).splitlines()) < 300 for name in own)


@pytest.mark.parametrize("odd", ["empty", "half", "garbage"])
def test_a_run_that_has_just_begun_or_is_damaged_makes_a_page(odd: str) -> None:
    b = Bucket()
    if odd != "empty":
        b.claim("r00", 1, 0.5)
        b.commit(0, 2.0, [b.offer(0, "r00", 1, 0.5)])
    if odd == "garbage":
        b.store.put(layout.log_key("r00", 1, 999), b'{"at": 1, "ev\n\xff\xfe\nnull\n[]\n')
        b.store.put(layout.commit_key(1), b"{}")
    head = page_data(read_report(b.store), T0 + 9)["head"]
    assert head["step"] == (0 if odd == "empty" else 1)
    assert bool(head["messages"]) == (odd == "garbage")

"""The settings of the outer step: one declaration and one check, for every way in.

    run.toml ──▶ RunConfig.from_dict ─┐
    make_diloco(sync_every=…, …) ─────┼─▶ OuterConfig ─▶ accepted, or refused in the same words
    make_diloco(outer=OuterConfig) ───┘

Not promised: which of two wrong settings is named first.
"""

import inspect
import math
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from diloco import OuterConfig, OuterError, StoreManager, make_diloco
from diloco.outer.loop import OuterLoop
from diloco.outer.managers.lighthouse import LighthouseManager
from diloco.run.config import CODECS, ConfigError, OuterConfigError, RunConfig
from rendezvous.agreement.rules import WEIGHTINGS, Rules
from rendezvous.stores.memory import MemoryStore
from tests.support.examples import examples

PARAMETERS = 12  # as many fragments as a test may ask for


class Nobody:
    """A Manager that is never entered."""

    _use_async_quorum = False
    done_with_delta = True
    rounds = property(lambda self: self)

    def register_state_dict_fn(self, *_: object) -> None: ...


def loop_with(*args: Any, **keywords: Any) -> OuterLoop:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(PARAMETERS)])
    manager: Any = Nobody()
    return make_diloco(model, torch.optim.SGD(model.parameters(), lr=0.1), manager, *args, **keywords)


def keywords_of(table: dict[str, Any]) -> dict[str, Any]:
    """The same settings as make_diloco calls them."""
    return {{"lr": "outer_lr", "momentum": "outer_momentum"}.get(k, k): v for k, v in table.items()}


def complaint(make: Any) -> str:
    """The words of a refusal; "" if there is none.  Anything but a refusal comes out of here."""
    try:
        make()
    except ConfigError as error:
        return str(error)
    return ""


WRONG: dict[str, list[Any]] = {
    "sync_every": [0, -6, 2.0, "6", None, True],
    "fragments": [0, -1, 4, 1.5, True],
    "fragment_sync_delay": [-1, 6, 1.0, False],
    "fragment_update_alpha": [-0.1, 1.5, math.nan, math.inf, "half", True],
    "lr": [-1, 0, math.nan, math.inf, -math.inf, True, "automatic", None, [0.7], 10**400],
    "momentum": [1.5, 1, -0.1, math.nan, math.inf, False, "0.5", None],
    "max_carry": [-1, 2.0, True, None, 10**400, 1 << 53],
    "age_discount": [2, -0.5, math.nan, True],
    "snapshot_every": [0, -3, 10.0, True],
    "codec": ["fp64", "", None, 8],
    "weighting": ["tokens", None],
    "norm_gate": [1.0, -1, math.nan, math.inf, True],
    "sync_seconds": [-5, 0, math.nan, math.inf, True, "5"],
}


def test_every_setting_has_a_wrong_value_here() -> None:
    assert set(WRONG) == {f.name for f in fields(OuterConfig)} and len(WRONG) == 13


@pytest.mark.parametrize(("name", "value"), [(k, v) for k, values in WRONG.items() for v in values])
def test_what_the_config_refuses_the_library_refuses_in_the_same_words(name: str, value: Any) -> None:
    table = {"sync_every": 6, name: value}
    said = complaint(lambda: RunConfig.from_dict({"outer": table}))
    assert f"outer.{name}" in said
    assert said == complaint(lambda: loop_with(**keywords_of(table))) == complaint(lambda: OuterConfig(**table))
    with pytest.raises(OuterError):  # what make_diloco has always raised
        loop_with(**keywords_of(table))


ints = st.integers(-2, 13) | st.sampled_from([1 << 40, 10**400])
floats = st.floats() | st.floats(0, 1) | st.floats(1.5, 12)
anything = st.none() | st.booleans() | ints | floats | st.text(max_size=3) | st.lists(ints, max_size=1)
one_of = {
    "sync_every": st.integers(0, 40), "fragments": st.integers(0, PARAMETERS),
    "fragment_sync_delay": st.integers(-1, 9), "max_carry": ints, "snapshot_every": ints,
    "codec": st.sampled_from([*CODECS, "auto", "zip"]),
    "lr": st.just("auto") | floats | ints, "weighting": st.sampled_from([*WEIGHTINGS, "tokens"]),
}  # fmt: skip
tables = st.fixed_dictionaries(
    {}, optional={f.name: one_of.get(f.name, floats | ints) | anything for f in fields(OuterConfig)}
)


@settings(max_examples=examples(400), deadline=None, derandomize=True)
@given(tables)
def test_both_ways_in_accept_and_refuse_the_same(table: dict[str, Any]) -> None:
    if table.get("fragments", 1) is not True and isinstance(n := table.get("fragments"), int) and n > PARAMETERS:
        del table["fragments"]  # the model's fault, not the setting's
    said = complaint(lambda: RunConfig.from_dict({"outer": table}))
    assert complaint(lambda: loop_with(**keywords_of(table))) == said
    if not said:
        config, loop = RunConfig.from_dict({"outer": table}).outer, loop_with(**keywords_of(table))
        assert loop.outer == config and loop.rules == config.rules
        assert loop_with(config).mathematics() == loop.mathematics()


def test_the_defaults_are_the_same_on_both_ways() -> None:
    assert loop_with().outer == RunConfig().outer == OuterConfig()


def test_an_outer_config_is_taken_as_it_is() -> None:
    config = OuterConfig(sync_every=6, lr=0.3, momentum=0.9, fragments=2, fragment_sync_delay=1)
    loop = loop_with(config)
    assert loop.outer is config and loop.interval == 3 and loop.prepare_at == 2
    group = loop.state.optimizers[0].param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.3, 0.9)


def test_every_setting_reaches_the_rules_that_have_it() -> None:
    config = OuterConfig(
        sync_every=12, fragments=3, max_carry=5, age_discount=0.25, snapshot_every=7, codec="int8", weighting="samples",
        norm_gate=4.0, sync_seconds=9.0,
    )  # fmt: skip
    shared = {f.name for f in fields(Rules)} & {f.name for f in fields(OuterConfig)}
    rules, defaults = asdict(config.rules), asdict(Rules())
    assert len(shared) == 9 and {k: rules[k] for k in shared} == {k: getattr(config, k) for k in shared}
    assert all(rules[k] != defaults[k] for k in shared), "or this would not notice"


def test_the_knobs_stand_once() -> None:
    """`make_diloco` repeats none of them."""
    assert list(inspect.signature(make_diloco).parameters) == [
        "model", "optimizer", "manager", "outer", "boundary", "settings",
    ]  # fmt: skip


def test_a_number_becomes_what_it_is_declared_as() -> None:
    """numpy's, too: their names in run.json would not be JSON."""
    config = OuterConfig(sync_every=np.int64(6), lr=np.float32(0.5), momentum=0, norm_gate=3)  # type: ignore[arg-type]
    assert config == OuterConfig(sync_every=6, lr=0.5, momentum=0.0, norm_gate=3.0)
    assert [type(x) for x in (config.sync_every, config.lr, config.momentum)] == [int, float, float]
    assert type(OuterConfig(lr=1).lr) is float


@pytest.mark.parametrize(
    ("call", "words"),
    [(lambda: loop_with(sync_evry=5), "unknown setting outer.sync_evry; did you mean outer.sync_every?"),
     (lambda: loop_with(lr=0.1), "make_diloco has no argument lr: use outer_lr"),
     (lambda: loop_with(momentum=0.1), "make_diloco has no argument momentum: use outer_momentum"),
     (lambda: loop_with(OuterConfig(), sync_every=6), "got outer=… and sync_every; put them into outer"),
     (lambda: loop_with(sync_every=10, boundary=4), "a sync every 10 inner steps would fall inside"),
     (lambda: loop_with(sync_every=10, boundary=0), "a sync every 10 inner steps would fall inside")],
)  # fmt: skip
def test_a_call_that_is_none(call: Any, words: str) -> None:
    with pytest.raises(OuterConfigError) as said:
        call()
    assert words in str(said.value)


class Torchft:
    """As much of a torchft.Manager as is asked for before the first quorum."""

    _use_async_quorum = False

    def register_state_dict_fn(self, *_: object) -> None: ...

    current_step = num_participants = allow_state_dict_read = disallow_state_dict_read = register_state_dict_fn


LIGHTHOUSE_HAS_NOT: list[dict[str, Any]] = [
    {"codec": "int8"}, {"codec": "auto"}, {"weighting": "samples"}, {"norm_gate": 3.0}, {"max_carry": 1},
    {"age_discount": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("setting", LIGHTHOUSE_HAS_NOT)
def test_what_a_lighthouse_has_not_is_refused_in_the_configs_words(setting: dict[str, Any]) -> None:
    said = complaint(lambda: RunConfig.from_dict({"rendezvous": "lighthouse://h:1", "outer": setting}))
    model, manager = nn.Linear(2, 2), Torchft()
    assert not hasattr(manager, "rounds"), "or it would not be taken for torchft's"
    loop = make_diloco(model, torch.optim.SGD(model.parameters(), lr=0.1), manager, **setting)  # type: ignore[arg-type]
    assert isinstance(loop.manager, LighthouseManager)
    assert said and said == complaint(loop.__enter__)


def test_a_slot_that_was_claimed_for_a_standing_run_needs_the_name_of_its_codec() -> None:
    first = StoreManager(MemoryStore(), replicas=1)
    model, second = nn.Linear(2, 2), StoreManager(first.session)
    loop = make_diloco(model, torch.optim.SGD(model.parameters(), lr=0.1), second, codec="auto")
    with pytest.raises(OuterConfigError, match="Name the codec of that run"):
        loop.__enter__()
    first.shutdown()

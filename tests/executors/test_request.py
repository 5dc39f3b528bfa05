"""What was typed, as everybody else reads it; and what a verb's own help says of it."""

import dataclasses

import pytest

from executors.platforms.places import Place
from executors.preflight.quote import BudgetRequest, FleetRequest, PlaceRequest, StartRequest
from executors.preflight.run_url import UsageError
from tests.support.command import asked, verbs


@pytest.mark.parametrize("argv", [("resume", "r"), ("train", "c", "--run", "r"), ("plan", "c")])
def test_what_was_not_typed_is_left_to_the_run(argv: tuple[str, ...]) -> None:
    found = asked(*argv)
    assert (found.places, found.budget, found.fleet) == (PlaceRequest(), BudgetRequest(), FleetRequest())
    assert not found.places.refines and found.fleet.told() == {}
    assert found.config == ("" if argv[0] == "resume" else "c")
    assert found.alert == (None if argv[0] == "plan" else ""), "nobody supervises a plan"


def test_a_start_with_everything() -> None:
    where = ("--place", "modal:2:H100", "--place", "local:1", "--gpu", "A100", "--secret", "aws", "--timeout", "6h")
    money = ("--max-usd", "$20", "--max-hours", "3", "--no-lease", "--allow-unknown-price", "--option", "a=1")
    ways = ("--again", "--from", "old@3", "--momentum", "--detach", "-y", "--alert", "https://x", "--no-preflight")
    found = asked("train", "c", "--run", "r", "--steps", "9", "--min-replicas", "2", "--json", *where, *money, *ways)
    places = (Place("modal", 2, ("H100",)), Place("local", 1))
    assert found == StartRequest(
        url="r",
        places=PlaceRequest(
            places=places, gpu=("A100",), secrets=("aws",), timeout_s=21600.0, options=(("a", 1),), no_lease=True
        ),
        budget=BudgetRequest(20.0, 3.0, True),
        fleet=FleetRequest(3, 9, 2),
        config="c",
        no_preflight=True,
        alert="https://x",
        again=True,
        origin="old@3",
        momentum=True,
        detach=True,
        yes=True,
        as_json=True,
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.yes = False  # type: ignore[misc]


def test_places_name_replicas_and_more_of_them_may_be_asked_for() -> None:
    assert asked("resume", "r", "--place", "local:2", "--replicas", "5").fleet.replicas == 5
    assert asked("resume", "r", "--place", "local", "--replicas", "5").fleet.replicas == 5
    with pytest.raises(UsageError, match="--place names 2 replicas, --replicas 1; leave one of them out"):
        asked("resume", "r", "--place", "local:2", "--replicas", "1")


@pytest.mark.parametrize("verb", verbs())
def test_a_verbs_own_help_says_what_each_word_is(verb: str) -> None:
    assert all(action.help for action in verbs()[verb]._actions)
    assert all(word in (text := verbs()[verb].format_help()) for word in ("exit codes:", "--json")), text

"""torchft's own tests, as shipped, with our Manager in the place of theirs.

    torchft.Manager(pg, replica_id, lighthouse_addr, …)  ──▶  StoreManager("memory://…", slot)     nothing else changes

local_sgd_test needs no Manager; local_sgd_integ_test and diloco_regression_test run replicas as threads with injected
failures.  The regression tests compare with golden files that are not in torchft's wheel, so they are made here: each
test runs first with torchft's own Manager (its Lighthouse, Gloo on loopback), and then with ours against that.

    torchft.Manager ──▶ parameters after every inner step, of each replica ──▶ "fixture" ──▶ the same test, our Manager
"""

import itertools
import json
import unittest
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("parameterized", reason="torchft's tests are written with it")

from torchft import diloco_regression_test, local_sgd_integ_test, local_sgd_test
from torchft._test import diloco_trainer
from torchft.manager import Manager

from diloco.outer.managers.manager import StoreManager
from rendezvous import layout
from rendezvous.agreement.rules import Timing

_lighthouses = itertools.count()


class Bucket:
    """The LighthouseServer of these tests: a name that the replicas share."""

    def __init__(self, **_: Any) -> None:
        self._address = f"lighthouse-{next(_lighthouses)}"

    def address(self) -> str:
        return self._address

    def shutdown(self) -> None:
        pass


class PatchedManager(StoreManager):
    """torchft.Manager's constructor and its injected process-group errors; the rest is ours."""

    def __init__(
        self,
        pg: Any,
        load_state_dict: Any,
        state_dict: Any,
        min_replica_size: int,
        replica_id: str,
        lighthouse_addr: str,
        timeout: timedelta = timedelta(seconds=60),
        **_: Any,
    ) -> None:
        super().__init__(
            f"memory://{lighthouse_addr}", layout.slot_name(int(replica_id)), replicas=3, min_replicas=min_replica_size,
            timing=Timing(give_up=timeout.total_seconds() * 3), load_state_dict=load_state_dict, state_dict=state_dict,
        )  # fmt: skip
        self._pg = pg

    def allreduce(self, tensor: Any, should_quantize: bool = False, **kwargs: Any) -> Any:
        if (error := getattr(self._pg, "_future_error", None)) is not None:
            self._pg._future_error = None
            self.report_error(error)
        return super().allreduce(tensor, should_quantize, **kwargs)


PATCHES = {
    diloco_trainer: {"Manager": PatchedManager},
    local_sgd_integ_test: {"Manager": PatchedManager, "LighthouseServer": Bucket},
    diloco_regression_test: {"LighthouseServer": Bucket},
}


def cases() -> list[Any]:
    loader = unittest.TestLoader()
    modules = (local_sgd_test, local_sgd_integ_test, diloco_regression_test)
    suites = [loader.loadTestsFromModule(m) for m in modules]
    return [case for suite in suites for group in suite for case in group]  # type: ignore[union-attr]


def test_there_are_tests() -> None:
    """43 in torchft 0.2.0: 8 unit, 28 integration, 7 regression."""
    assert len(cases()) == 43


def passes(case: unittest.TestCase) -> None:
    result = unittest.TestResult()
    case.run(result)
    problems = [trace for _, trace in result.errors + result.failures]
    assert not problems, problems[0]
    assert not result.skipped, result.skipped


def regression(case: unittest.TestCase) -> bool:
    return isinstance(case, diloco_regression_test.DiLoCoMockedUpdateTest)


def golden(case: unittest.TestCase) -> Any:
    """The parameter histories that torchft's own Manager gives, as its fixture files would have them."""
    kept: list[Any] = []
    with (
        mock.patch.object(diloco_regression_test, "handle_fixture", lambda name, results: kept.append(results)),
        mock.patch.object(diloco_trainer, "Manager", lambda **given: Manager(**{**given, "port": 0})),  # any free one
    ):
        passes(case)
    return json.loads(json.dumps(kept[0]))


# of torchft's twelve combinations of fragments, delay and alpha, so many are fast tests; each value is in two of them
FAST = ("00", "04", "07", "09", "11")


def of_the_grid(case: unittest.TestCase) -> Any:
    name = case.id()
    slow = "streaming_diloco_upscale" in name or "streaming_diloco_commit_failure" in name
    again = "mocked_updates" in name and not name.endswith("_0")
    marks = [pytest.mark.slow] if again or (slow and name[-2:] not in FAST) else []
    return pytest.param(case, id=name.removeprefix("torchft."), marks=marks)


@pytest.mark.parametrize("case", map(of_the_grid, cases()))
def test_shipped(case: unittest.TestCase) -> None:
    fixture = golden(case) if regression(case) else None
    expected = newcomer_on_the_survivors_path if "recovery" in case.id() else lambda fixture, results: fixture
    with (
        mock.patch.object(
            diloco_regression_test, "handle_fixture", lambda name, results: fixture and expected(fixture, results)
        ),
        Patched(),
    ):
        passes(case)


ROUND = 3  # inner steps between two syncs: sync_every 6, two fragments


def newcomer_on_the_survivors_path(fixture: Any, results: Any) -> Any:
    """The one difference, and it is meant: the replica that was restarted.

    torchft's trains its first round from the initial parameters, throws that work away, and is healed at its first
    quorum.  Ours holds the run's θ before its first inner step, so that its first round counts.  From there on both
    replicas have the same parameters: each of the newcomer's steps is one of torchft's survivor, some whole rounds
    later.  How many rounds depends on how fast it was restarted: one, or two as in torchft's own run.
    """
    survivor, newcomer = fixture
    path, steps = survivor[0]["history"], [int(step) for step in results[1][0]["history"]]
    first = next(step for step in steps if step > 0)
    for ahead in range(ROUND, len(path), ROUND):
        if _is_close(path.get(str(first + ahead), {}), results[1][0]["history"][first]):
            history = {str(t): path[str(t + ahead)] for t in steps if t > 0 and str(t + ahead) in path}
            assert len(history) >= len(path) - ahead - 1, "a step of the newcomer is missing"
            return [survivor, [{**newcomer[0], "history": history}]]
    return fixture  # the newcomer is nowhere on the path: the comparison says where it was to be


def _is_close(params: Any, others: Any) -> bool:
    return params.keys() == others.keys() and all(
        torch.allclose(torch.tensor(params[name]), torch.tensor(others[name]), rtol=1e-5, atol=1e-5) for name in params
    )


class Patched:
    """All PATCHES for the time of one test."""

    def __enter__(self) -> None:
        self._active = [mock.patch.object(m, n, v) for m, names in PATCHES.items() for n, v in names.items()]
        for patch in self._active:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in reversed(self._active):
            patch.stop()

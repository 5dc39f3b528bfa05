"""torchft's own tests, as shipped, with our Manager in the place of theirs.

    torchft.Manager(pg, replica_id, lighthouse_addr, …)  ──▶  StoreManager("memory://…", slot)     nothing else changes

local_sgd_test needs no Manager; local_sgd_integ_test and diloco_regression_test run replicas as threads with injected
failures.  Golden files are not in torchft's wheel, so the regression tests fall back to their own arithmetic checks.
"""

import itertools
import unittest
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("parameterized", reason="torchft's tests are written with it")

from torchft import diloco_regression_test, local_sgd_integ_test, local_sgd_test
from torchft._test import diloco_trainer

from diloco.manager import StoreManager
from rendezvous import layout
from rendezvous.rules import Timing

_lighthouses = itertools.count()


class Bucket:
    """What a LighthouseServer is in these tests: a name that the replicas share."""

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
    diloco_regression_test: {"LighthouseServer": Bucket, "handle_fixture": lambda *_: None},
}


def cases() -> list[Any]:
    loader = unittest.TestLoader()
    modules = (local_sgd_test, local_sgd_integ_test, diloco_regression_test)
    suites = [loader.loadTestsFromModule(m) for m in modules]
    return [case for suite in suites for group in suite for case in group]  # type: ignore[union-attr]


def test_there_are_tests() -> None:
    """43 in torchft 0.2.0: 8 unit, 28 integration, 7 regression."""
    assert len(cases()) == 43


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.id().removeprefix("torchft."))
def test_shipped(case: unittest.TestCase) -> None:
    with Patched():
        result = unittest.TestResult()
        case.run(result)
    problems = [trace for _, trace in result.errors + result.failures]
    assert not problems, problems[0]
    assert not result.skipped, result.skipped


class Patched:
    """All PATCHES for the time of one test."""

    def __enter__(self) -> None:
        self._active = [mock.patch.object(m, n, v) for m, names in PATCHES.items() for n, v in names.items()]
        for patch in self._active:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in reversed(self._active):
            patch.stop()

"""`Backend` has a short contract: a third kind of worker is one small class."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from helpers.comparison import assert_same
from simulators.deterministic import Hunt

from marl_parallel import Backend, ParallelEnv
from marl_parallel.core.backend import Capabilities
from marl_parallel.core.block.columns import Layout
from marl_parallel.core.messages import Lost, Reply, Request
from marl_parallel.core.worker.worker import Worker
from marl_parallel.core.worker_status import WorkerStatus

pytestmark = pytest.mark.release_independent


class InCalls(Backend):
    """Workers in this thread, with nothing but what the contract demands."""

    capabilities = Capabilities(
        enforces_timeouts=False, can_kill=False, side_by_side=False, shares_memory=True, pickles=False
    )

    def start(self, shares: Sequence[range], most_requests: int) -> None:
        self.in_line = range(len(shares))
        self.statuses = [WorkerStatus(bytearray(WorkerStatus.NBYTES)) for _ in shares]
        self.workers = [Worker(status, lambda _: self.block, in_line=True) for status in self.statuses]
        self.replies: list[tuple[int, Reply | Lost]] = []

    def allocate(self, nbytes: int, layout: Layout | None = None) -> Any:
        self.block = bytearray(nbytes)
        return self.block

    def post(self, requests: Mapping[int, Request], *, together: bool = False) -> None:
        for worker, request in requests.items():
            self.workers[worker].execute(request, lambda reply, worker=worker: self.replies.append((worker, reply)))

    def wait(self, timeout: float | None = None, at_least: int = 1) -> list[tuple[int, Reply | Lost]]:
        replies, self.replies = self.replies, []
        return replies

    def end(self, worker: int) -> Sequence[Reply]:
        raise NotImplementedError

    def start_worker(self, worker: int, share: Sequence[int], beside: int | None = None) -> None:
        raise NotImplementedError

    def interrupt(self) -> None: ...

    def stack(self, worker: int, *, harmless: bool = False) -> str:
        return ""

    def stop(self, timeout: float) -> list[int]:
        return []

    def abandon(self) -> None: ...


def test_the_contract_is_short():
    methods = {name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")}
    assert len(methods) <= 18, sorted(methods)
    assert len(Backend.__abstractmethods__) <= 10, sorted(Backend.__abstractmethods__)


def test_a_class_with_the_abstract_methods_alone():
    """The results are those of a backend of the package."""
    got, actions = list[list[Any]](), list[Any]()
    for backend in (InCalls(), "serial"):
        with ParallelEnv([Hunt] * 3, backend=backend, num_workers=2, seed=5) as env:
            results: list[Any] = [env.reset()]
            for time in range(30):
                if time == len(actions):
                    actions.append(env.sample_actions())
                results.append(env.step(actions[time]))
            got.append(results)
    assert_same(*got)


def test_capabilities_do_not_change():
    with pytest.raises(AttributeError):
        InCalls.capabilities.can_kill = True  # type: ignore[misc]

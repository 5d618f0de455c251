"""Ray clusters on this machine: one node that most tests share, or several nodes; at most one cluster at a time."""

from __future__ import annotations

from typing import Any

import ray
from ray.cluster_utils import Cluster

NODES, CPUS_EACH = 3, 2
_QUIET = {"prestart_worker_first_driver": False}
_DEATHS_SEEN_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 2,
}


class RayClusters:
    """Keeps the current cluster until a different one is requested."""

    def __init__(self) -> None:
        self._cluster: Any = None

    def one_node(self) -> None:
        """A node with eight CPUs, and two GPUs for Ray's accounts."""
        if self._cluster is not None or not ray.is_initialized():
            self.shut_down()
            options = {"include_dashboard": False, "log_to_driver": False, "_system_config": _QUIET}
            ray.init("local", num_cpus=8, num_gpus=2, **options)

    def three_nodes(self) -> Any:
        """A cluster of three nodes, and a head without actors."""
        if self._cluster is None:
            self.shut_down()
            config = {**_QUIET, **_DEATHS_SEEN_SOON}
            self._cluster = Cluster(
                initialize_head=True,
                head_node_args={"num_cpus": 0, "_system_config": config, "include_dashboard": False},
            )
        if not ray.is_initialized():
            ray.init(address=self._cluster.address, log_to_driver=False)
        for _ in range(NODES - len(self._cluster.worker_nodes)):  # a test may have removed one
            self._cluster.add_node(num_cpus=CPUS_EACH)
        self._cluster.wait_for_nodes()
        return self._cluster

    def shut_down(self) -> None:
        """Shut down the current cluster."""
        ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None

    close = shut_down

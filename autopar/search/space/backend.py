"""The backend that the options and the cluster ask for."""

from __future__ import annotations

from autopar.cost_model import Cluster
from autopar.errors import PlanError
from autopar.search.space.options import Options


def check_software(options: Options, cluster: Cluster) -> None:
    """Raises :class:`PlanError` where the backend that was asked for is not the one that the
    cluster's prices are of.
    """
    if options.backend == "eager" and cluster.software.fuses:
        raise PlanError(
            f"the prices of cluster {cluster.name!r} with software {cluster.software.name!r} are "
            'those of a compiler that joins kernels, and backend="eager" joins none: give the '
            'cluster with software "eager", or leave backend free'
        )


def is_eager(options: Options, cluster: Cluster) -> bool:
    """Whether the options and the cluster alone leave no backend but eager."""
    return options.backend == "eager" or (options.backend is None and cluster.device.kind == "cpu")


def is_compiled(options: Options, cluster: Cluster) -> bool:
    """Whether prices are those of a program that inductor compiles: it was asked for, or the
    cluster's software joins kernels.
    """
    return options.backend == "inductor" or cluster.software.fuses

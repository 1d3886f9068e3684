"""Whether tensors may move to the memory of the host."""

from __future__ import annotations

from autopar.cost_model import Cluster
from autopar.errors import PlanError
from autopar.search.space.backend import is_compiled
from autopar.search.space.options import Options


def check_offload(options: Options, cluster: Cluster) -> None:
    """Raises :class:`PlanError` where tensors may move to the host, and the cluster does not say
    how fast they are copied.
    """
    unknown = [kind.name for kind in cluster.kinds if kind.device.host_bandwidth is None]
    asked = f"offload={options.offload!r}" if options.offload != "none" else ""
    asked = f"zero={options.zero!r}" if options.state_on_host == (True,) else asked
    if asked and unknown:
        raise PlanError(
            f"{asked}: cluster {unknown[0]!r} has no device.host_bandwidth, "
            "the B/s of a copy to the host: add it to the cluster's file, or plan without offload"
        )


def offloads_results(options: Options, cluster: Cluster) -> bool:
    """Whether the host may keep saved results: those of a program that inductor does not
    compile.
    """
    return options.offload == "auto" and not is_compiled(options, cluster)

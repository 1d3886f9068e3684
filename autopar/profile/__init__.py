"""How fast is this machine? Measures it into a cluster description.

Only this folder opens devices and process groups to learn numbers. Reading order: ``profiler`` runs
a profile. ``measurements`` are its measurements, with the kernels of ``kernel_probes``, the
collectives of ``collective_probes``, the timing of one call in ``timing`` and all ranks together in
``rank_group``. ``fit_cluster`` turns the timings into a cluster, ``machine`` describes the machine.
Apart from a profile, ``missing_kernels`` measures kernels that a cluster has no curve of.
"""

from autopar.profile.machine import check_machine
from autopar.profile.profiler import NoisyMeasurement, measure_cluster

__all__ = ["NoisyMeasurement", "check_machine", "measure_cluster"]

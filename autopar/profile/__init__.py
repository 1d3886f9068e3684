"""Measures a machine into a cluster description. The only part that opens devices and process
groups to learn numbers.
"""

from autopar.profile.machine import check_machine
from autopar.profile.profiler import NoisyMeasurement, measure_cluster

__all__ = ["NoisyMeasurement", "check_machine", "measure_cluster"]

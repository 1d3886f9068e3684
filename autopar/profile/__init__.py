"""Measures a machine into a cluster description. The only part that opens devices and process
groups to learn numbers.
"""

from autopar.profile.machine import check_machine
from autopar.profile.profiler import NoisyMeasurement, measured

__all__ = ["NoisyMeasurement", "check_machine", "measured"]

"""Measures a machine into a cluster description. The only part that opens devices and process groups to learn numbers."""

from autopar.profile.profiler import NoisyMeasurement, check_machine, measured

__all__ = ["NoisyMeasurement", "check_machine", "measured"]

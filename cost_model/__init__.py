"""Seconds and bytes: what a plan would cost on a cluster, from formulas and the cluster's figures. Nothing here runs on a device."""

from autopar.cost_model.cluster import Cluster, Device, Level
from autopar.cost_model.collectives import Axis, axes, received_bytes, seconds
from autopar.cost_model.compute import Compute
from autopar.cost_model.conversion import Conversions, Term
from autopar.cost_model.memory import ParameterMemory, allocated, optimizer_traffic, parameter_memory

__all__ = [
    "Axis",
    "Cluster",
    "Compute",
    "Conversions",
    "Device",
    "Level",
    "ParameterMemory",
    "Term",
    "allocated",
    "axes",
    "optimizer_traffic",
    "parameter_memory",
    "received_bytes",
    "seconds",
]

"""Seconds and bytes: what a plan would cost on a cluster, from formulas and the cluster's figures.
Nothing here runs on a device.
"""

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import Axis, axes, point_to_point, received_bytes, seconds
from autopar.cost_model.compute import Compute
from autopar.cost_model.conversion import Conversions, Term
from autopar.cost_model.device import Device, Level
from autopar.cost_model.memory import (
    ParameterMemory,
    allocated,
    optimizer_traffic,
    parameter_memory,
)
from autopar.cost_model.schedule import Action, actions, in_flight
from autopar.cost_model.timeline import Event, Timeline, in_turns, makespans, simulate, timeline_of

__all__ = [
    "Action",
    "Axis",
    "Cluster",
    "Compute",
    "Conversions",
    "Device",
    "Event",
    "Level",
    "ParameterMemory",
    "Term",
    "Timeline",
    "actions",
    "allocated",
    "axes",
    "in_flight",
    "in_turns",
    "makespans",
    "optimizer_traffic",
    "parameter_memory",
    "point_to_point",
    "received_bytes",
    "seconds",
    "simulate",
    "timeline_of",
]

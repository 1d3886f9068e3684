"""Seconds and bytes: what a plan would cost on a cluster, from formulas and the cluster's figures.
Nothing here runs on a device.
"""

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import (
    AxisLinks,
    axis_links,
    collective_seconds,
    point_to_point,
    received_bytes,
)
from autopar.cost_model.compute import ComputeCosts
from autopar.cost_model.conversion import ConversionCosts, Term
from autopar.cost_model.device import Device, Level
from autopar.cost_model.memory import (
    ParameterMemory,
    allocated_bytes,
    optimizer_traffic,
    parameter_memory,
)
from autopar.cost_model.schedule import Action, actions, in_flight
from autopar.cost_model.shared_cores import ends_on_shared_cores
from autopar.cost_model.simulate import schedule_seconds, simulate, simulate_schedule
from autopar.cost_model.timeline import Event, Timeline

__all__ = [
    "Action",
    "AxisLinks",
    "Cluster",
    "ComputeCosts",
    "ConversionCosts",
    "Device",
    "Event",
    "Level",
    "ParameterMemory",
    "Term",
    "Timeline",
    "actions",
    "allocated_bytes",
    "axis_links",
    "in_flight",
    "ends_on_shared_cores",
    "schedule_seconds",
    "optimizer_traffic",
    "parameter_memory",
    "point_to_point",
    "received_bytes",
    "collective_seconds",
    "simulate",
    "simulate_schedule",
]

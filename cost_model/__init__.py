"""What does a plan cost? Seconds and bytes on a cluster, from formulas and the cluster's figures.

Nothing in this folder runs on a device. Reading order: ``device``, ``links``, ``software`` and
``cluster`` hold the figures of a machine, ``cluster_data`` reads and writes them, ``calibrate``
corrects them with a measured run. ``compute`` prices a kernel. ``axis_links`` and ``mesh_links``
say which links groups of ranks cross, ``collectives`` prices a collective on them, and ``memory``
parameters and their optimizer. ``conversion_steps``, ``layout_graph`` and ``conversion`` price the
change of a tensor's layout. ``schedule`` gives the order of a pipeline's actions, ``own_orders``
that of a schedule that a user has registered, ``timeline`` is the result of a simulation,
``rank_orders`` and ``simulate`` compute it, ``shared_cores`` does so for ranks that share CPU
cores, and ``plan_timeline`` simulates a plan.
"""

from autopar.cost_model.axis_links import AxisLinks, axis_links
from autopar.cost_model.cluster import Cluster
from autopar.cost_model.collectives import collective_seconds, point_to_point, received_bytes
from autopar.cost_model.compute import ComputeCosts
from autopar.cost_model.compute_of_kinds import Pace, compute_costs
from autopar.cost_model.conversion import ConversionCosts
from autopar.cost_model.conversion_steps import Term
from autopar.cost_model.device import Device
from autopar.cost_model.links import CollectiveFigures, Level
from autopar.cost_model.memory import (
    ParameterMemory,
    allocated_bytes,
    optimizer_traffic,
    parameter_memory,
    state_copies,
)
from autopar.cost_model.mesh_links import MeshLinks, fastest_links, placed_links
from autopar.cost_model.schedule import actions, in_flight
from autopar.cost_model.shared_cores import ends_on_shared_cores
from autopar.cost_model.simulate import schedule_seconds, simulate, simulate_schedule
from autopar.cost_model.software import Software
from autopar.cost_model.timeline import Event, Timeline
from autopar.ir.schedules import Action

__all__ = [
    "Action",
    "AxisLinks",
    "Cluster",
    "CollectiveFigures",
    "ComputeCosts",
    "ConversionCosts",
    "Device",
    "Event",
    "Level",
    "MeshLinks",
    "Pace",
    "ParameterMemory",
    "Software",
    "Term",
    "Timeline",
    "actions",
    "allocated_bytes",
    "axis_links",
    "compute_costs",
    "fastest_links",
    "in_flight",
    "ends_on_shared_cores",
    "schedule_seconds",
    "optimizer_traffic",
    "parameter_memory",
    "placed_links",
    "point_to_point",
    "received_bytes",
    "collective_seconds",
    "simulate",
    "simulate_schedule",
    "state_copies",
]

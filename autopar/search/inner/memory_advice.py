"""The options that would free memory where no plan fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopar.cost_model.memory import state_copies
from autopar.formatting.table import format_bytes
from autopar.search.space.meshes import Axis
from autopar.search.space.options import Options

# The kinds of memory that do not last from step to step.
_TEMPORARY = ("inputs", "activations", "transient", "outputs", "recomputed", "compute copies")


def memory_advice(kinds: Mapping[str, float], options: Options, axes: Sequence[Axis]) -> str:
    """The three options that would free most memory, with about how much each frees.

    Args:
        kinds: the bytes of a device, by kind, of the plan that needs least.
        axes: the mesh of this plan.
    """
    lasting = sum(nbytes for kind, nbytes in kinds.items() if kind not in _TEMPORARY)
    found = [(sum(kinds.values()) / 2, f"world_size={2 * options.world_size}, at most")]
    replicas = math.prod(a.size for a in axes if a.use != "tensor")
    if options.zero_stage == 0 and replicas > 1:
        found.append((lasting * (1 - 1 / replicas), "zero=2, about"))
    if options.micro_batch_size is not None and options.micro_batch_size > 1:
        temporary = max(kinds.get("activations", 0.0), kinds.get("transient", 0.0))
        nbytes = temporary * (1 - 1 / options.micro_batch_size)
        found.append((nbytes, "micro_batch_size=1, about"))
    if options.recompute in ("none", "selective") and kinds.get("activations"):
        found.append(
            (kinds["activations"] / 2, 'recompute="auto", about half of the activations\' or more,')
        )
    if kinds.get("outputs"):
        found.append((kinds["outputs"], "a model that returns its loss alone, about"))
    if kinds.get("optimizer"):
        may_move = options.state_on_host == (False,) and state_copies(options.optimizer)
        way = 'offload="auto", about' if may_move else 'optimizer="sgd", if you train with it,'
        found.append((kinds["optimizer"], way))
    fixed = [f"{name}=" for name in ("parallel", "mesh", "constraints") if getattr(options, name)]
    most = sorted(found, reverse=True)[:3]
    ways = [f"{option} {format_bytes(nbytes)}" for nbytes, option in most]
    return "; ".join(ways + [f"or leaving out {' and '.join(fixed)}"] * bool(fixed))

"""``nn.init`` on a program's parameters.

torch lets each rank draw for its own part: replicas then differ, and parts that should differ are
alike. Here the values are those that one device draws.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.dtensors.data_assignment import program_parameter_of
from autopar.runtime.dtensors.program_handlers import install_handler
from autopar.runtime.dtensors.torch_private import RANDOM_OPERATORS

_IN_PLACE = {
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.bernoulli_.float,
}


def install_random_fill() -> None:
    """From now on random operators on DTensors of programs draw the values of one device, or raise
    :class:`RunError`.
    """
    install_handler(RANDOM_OPERATORS, _draw)


def _draw(tensor: DTensor, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    parameter = program_parameter_of(tensor)
    if parameter is None or operator not in _IN_PLACE:
        raise RunError(
            f"{operator} on a DTensor of a compiled program would draw on each of its ranks "
            "apart: draw a plain tensor of its shape, on all ranks after the same "
            "torch.manual_seed, and lay it with torch.distributed.tensor.distribute_tensor(drawn, "
            "like.device_mesh, like.placements)"
        )
    mesh = parameter.mesh
    if mesh.pipeline > 1:
        raise RunError(
            f"{operator} on {parameter.name}: the ranks of a pipeline hold different parameters, "
            "so their generators would go apart: draw the values before compiling, or give them "
            "with load_state_dict"
        )
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=mesh.device)
    operator(whole, *args[1:], **kwargs)
    group = mesh.axes_group([axis for axis, n in enumerate(mesh.sizes) if n > 1])
    dist.broadcast(whole, group=group, group_src=0)  # ranks may have different seeds
    tensor.to_local().copy_(parameter.shard(whole).to_local())
    return tensor

"""``nn.init`` on a program's parameters: torch lets each rank draw for its own part, so that
replicas differ and parts are alike; here the values are those that one device draws.

This patches a private table of torch: the handlers of DTensor's dispatcher, by operator.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.communication.mesh import Mesh
from autopar.runtime.parameters.data_assignment import program_parameter_of

_DISPATCHER: Any = DTensor._op_dispatcher
_IN_PLACE = {
    torch.ops.aten.normal_.default,
    torch.ops.aten.uniform_.default,
    torch.ops.aten.bernoulli_.float,
}
_MESHES: weakref.WeakValueDictionary[int, DeviceMesh] = (
    weakref.WeakValueDictionary()
)  # of programs, by id: equal ones may be others'


def install_random_fill(mesh: Mesh) -> None:
    """From now on random operators on DTensors of ``mesh`` draw what one device draws, or raise
    :class:`RunError`.
    """
    _MESHES[id(mesh.device_mesh)] = mesh.device_mesh
    for operator in _DISPATCHER._random_ops:
        _DISPATCHER._custom_op_handlers.setdefault(operator, _draw)


def _draw(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = next((a for a in args if isinstance(a, DTensor)), None)
    if tensor is None or id(tensor.device_mesh) not in _MESHES:
        return _as_torch_does(operator, args, kwargs)
    known = program_parameter_of(tensor)
    if known is None or operator not in _IN_PLACE:
        raise RunError(
            f"{operator} on a DTensor of a compiled program would draw on each of its ranks "
            "apart: draw a plain tensor of its shape, on "
            "all ranks after the same torch.manual_seed, and lay it with "
            "torch.distributed.tensor.distribute_tensor(drawn, "
            "like.device_mesh, like.placements)"
        )
    if known.mesh.pipeline > 1:
        raise RunError(
            f"{operator} on {known.name}: the ranks of a pipeline hold different parameters, so "
            "their generators would go apart: draw the "
            "values before compiling, or give them with load_state_dict"
        )
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=known.mesh.device)
    operator(whole, *args[1:], **kwargs)
    group = known.mesh.axes_group([axis for axis, n in enumerate(known.mesh.sizes) if n > 1])
    dist.broadcast(whole, group=group, group_src=0)  # ranks may have other seeds
    tensor.to_local().copy_(known.placed(whole).to_local())
    return tensor


def _as_torch_does(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    handlers = _DISPATCHER._custom_op_handlers
    del handlers[operator]
    try:
        return operator(*args, **kwargs)
    finally:
        handlers[operator] = _draw

"""A bound of the memory of a configuration that needs no problem."""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from autopar.cost_model import parameter_memory
from autopar.cost_model.memory import optimizer_temporaries
from autopar.search.inner.inner_search import InnerSearch
from autopar.search.pricing.node_sizes import stored_dtype
from autopar.search.space.configuration import Configuration


def byte_floor(search: InnerSearch, configuration: Configuration, samples: int) -> float:
    """Bytes that the fullest device of a configuration holds in any plan.

    The bytes that exist on all devices together are spread evenly. At the end of a step these are
    the batch, parameters, gradients, the optimizer's state and, of several microbatches or stages,
    the largest output: the parts and the whole into which they are concatenated, or the whole and
    the optimizer's temporary tensors. In a step of one part the output is there before the
    gradients. Without ZeRO, each data-parallel replica has a copy of what lasts. One stage has the
    largest output, split over the axes that divide one of its dims.

    State of the optimizer that may be in the memory of the host counts for nothing.

    Args:
        samples: of the whole batch.
    """
    floors = search.cache.floors
    state = search.options.optimizer, True in search.options.state_on_host
    lasting = floors.of(("lasting bytes", *state), lambda: _lasting_bytes(search, True))
    at_output = floors.of(("bytes at output", *state), lambda: _lasting_bytes(search, False))
    largest = floors.of("largest output", lambda: _largest_output(search))
    output = float(_bytes(largest.meta["val"])) if largest else 0.0
    output *= samples / search.analysis.batch.size
    batch = floors.of("batch bytes", lambda: _batch_bytes(search))
    batch *= samples / search.analysis.batch.size
    temporaries = floors.of(("temporary bytes", *state), lambda: _temporary_bytes(search))
    copies = 1
    if search.options.zero_stage == 0:
        copies = math.prod(a.size for a in configuration.axes if a.use == "data")
    if configuration.microbatches == configuration.stages == 1:
        total = max((lasting + temporaries) * copies, at_output * copies + output)
        of_output = output
    else:
        total = lasting * copies + output + max(output, temporaries * copies)
        of_output = 2 * output
    if largest:
        of_output /= _most_parts(search, largest, configuration, samples)
    return max((total + batch) / search.options.world_size, of_output)


def _lasting_bytes(search: InnerSearch, has_gradients: bool) -> float:
    """Bytes of one copy of all parameters that train, with the optimizer's state that is on the
    devices.
    """
    analysis, has_state = search.analysis, True not in search.options.state_on_host
    total = 0
    for node in (n for n in analysis.state if n in analysis.differentiable):
        elements, itemsize = node.meta["val"].numel(), stored_dtype(node).itemsize
        memory = parameter_memory(elements, itemsize, search.options.optimizer, rounded=int)
        total += memory.parameters + memory.optimizer * has_state + memory.gradients * has_gradients
    return float(total)


def _temporary_bytes(search: InnerSearch) -> float:
    """Bytes of the temporary tensors of the optimizer's step, of one copy of all parameters; 0
    where these need not exist at one time: on a CPU, which updates one bucket after the other.
    """
    options = search.options
    if True in options.state_on_host or search.tracer.device_type != "cuda":
        return 0.0
    analysis = search.analysis
    trained = [n for n in analysis.state if n in analysis.differentiable]
    stored = [n.meta["val"].numel() * stored_dtype(n).itemsize for n in trained]
    return float(optimizer_temporaries(stored, options.optimizer, together=True))


def _batch_bytes(search: InnerSearch) -> float:
    """Bytes of the inputs that have a batch."""
    analysis = search.analysis
    inputs = [n for n in analysis.inputs if analysis.batch.dim(n) is not None]
    return float(sum(_bytes(n.meta["val"]) for n in inputs))


def _largest_output(search: InnerSearch) -> fx.Node | None:
    """The largest tensor with a batch that the model returns besides its loss."""
    analysis = search.analysis
    made = [n for n in analysis.returned if analysis.batch.dim(n) is not None]
    tensors = [n for n in made if isinstance(n.meta["val"], torch.Tensor)]
    return max(tensors, key=lambda n: _bytes(n.meta["val"]), default=None)


def _most_parts(
    search: InnerSearch, output: fx.Node, configuration: Configuration, samples: int
) -> int:
    """The most parts into which the mesh can split an output of one microbatch."""
    shape, batch = list(output.meta["val"].shape), search.analysis.batch
    if (dim := batch.dim(output)) is not None:
        shape[dim] = shape[dim] * samples // (batch.size * configuration.microbatches)
    axes = configuration.axes
    return math.prod(
        a.size for a in axes if a.use == "data" or any(size % a.size == 0 for size in shape)
    )


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; 0 of a tensor that shows its elements several times."""
    is_expanded = any(stride == 0 for stride in tensor.stride())
    return 0 if is_expanded else tensor.numel() * tensor.dtype.itemsize

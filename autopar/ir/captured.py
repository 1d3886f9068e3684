"""A captured model as data: the graph, the meaning of its placeholders, and the division of the
batch into microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class GraphInput:
    """One placeholder of a captured graph.

    Attributes:
        name: the placeholder's node name.
        kind: ``"parameter"``, ``"buffer"``, ``"constant"`` (a tensor that the forward makes from
            Python numbers), ``"input"``, or ``"hoisted"`` (a tensor that is computed once a step
            for all microbatches).
        target: the name in the model; for an input its place in the call, such as ``"input_ids"``
            or ``"args[0]"``.
    """

    name: str
    kind: str
    target: str


@dataclass(frozen=True)
class BatchDivision:
    """How the batch is divided into microbatches.

    Each node of a microbatch's graph has a type along time, ``meta["time"]``: R (the tensor is the
    same for every microbatch), P (the tensors of the microbatches add up), or S(d) (a microbatch
    has a chunk of dim ``d``).

    A model may take the batch apart into equal parts, such as two views of each sample in one
    tensor: a microbatch then has a chunk of each part. It may also combine adjacent samples, such
    as pairs: they must stay in one chunk.

    Attributes:
        samples: the number of samples in a microbatch.
        parts: the number of equal parts into which the model takes the batch apart.
        max_chunks: the largest number of chunks of each part that keeps combined samples together.
            Each divisor of this number is possible, too.
        per_microbatch_updates: the numbers of the buffer updates that each microbatch makes with
            its own statistics. All other updates are made once, from the whole batch.
        inexact_operators: descriptions of the operators that compute statistics of a microbatch in
            place of statistics of the whole batch.
        limiting_operator: the description of the operator that combines most samples; "" if no
            operator combines samples.
    """

    samples: int
    parts: int
    max_chunks: int
    per_microbatch_updates: tuple[int, ...] = ()
    inexact_operators: tuple[str, ...] = ()
    limiting_operator: str = ""

    def chunks_per_part(self, microbatches: int, degree: int) -> int:
        """The number of chunks into which each part is cut: microbatch ``i`` has the ``i``-th piece
        of every chunk.

        With this number each rank has samples of every microbatch, as far as ``max_chunks`` allows.

        Args:
            microbatches: how many microbatches the batch has.
            degree: how many ranks split the batch.
        """
        return math.gcd(math.lcm(degree, self.parts) // self.parts, self.max_chunks // microbatches)


@dataclass
class CapturedModel:
    """A captured model.

    Attributes:
        graph: one placeholder for each of ``inputs``, in that order. The output node holds the flat
            user outputs, constants included, then the new values of ``updates``. Every node has
            ``meta["val"]`` (fake tensors of the global shape), ``meta["module"]`` (a path) and
            ``meta["source"]`` (file and line).
        in_spec: the pytree of ``(args, kwargs)`` as the user gives them. User inputs are in its
            flat order.
        constant_inputs: the inputs that are no tensors, by flat position in ``in_spec``. They have
            no placeholder.
        out_spec: the pytree of the user's outputs.
        loss: the place of the loss, a scalar, among the flat user outputs.
        updates: the names of the buffers whose new values the graph returns. The running statistics
            of BatchNorm are not among them, because the operator itself writes to them.
        state: every parameter and buffer of the model under its first name, used or not, and the
            constants.
        aliases: further names of tied parameters and buffers, each with its name in ``state``.
        notes: sentences for the user.
        compute_dtype: the dtype that was asked for; None if the graph has the model's dtypes.
        stored_dtypes: by placeholder name, the dtype of a tensor that the graph has in
            ``compute_dtype`` instead. Empty in a canonical graph, where the placeholders of such
            parameters have ``meta["stored"]``.
        fingerprint: a hash of the canonical graph of the whole batch, also in the graph of a
            microbatch.
        division: how the batch is divided, in the graph of a microbatch.
        attributes_read: the numbers, strings and the like that the trace read of objects which the
            model or the loss function holds: the path of an object and the attribute's name.
        tensors_read: the tensors that the trace read and that are neither parameters nor buffers.
    """

    graph: fx.Graph
    inputs: tuple[GraphInput, ...]
    in_spec: pytree.TreeSpec
    constant_inputs: dict[int, Any]
    out_spec: pytree.TreeSpec
    loss: int
    updates: tuple[str, ...] = ()
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    compute_dtype: torch.dtype | None = None
    stored_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    fingerprint: str = ""
    division: BatchDivision | None = None
    attributes_read: frozenset[tuple[str, str]] = frozenset()
    tensors_read: tuple[torch.Tensor, ...] = ()

    @property
    def placeholders(self) -> dict[fx.Node, GraphInput]:
        """The placeholders of the graph, in order, each with its entry in ``inputs``."""
        return dict(zip(self.graph.find_nodes(op="placeholder"), self.inputs, strict=True))

    @property
    def state_text(self) -> str:
        """The properties of all tensors of the state that a program depends on, of unused ones
        too.
        """
        return repr(
            [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in self.state.items()]
        )


LossFunction = Callable[[Any, Any], torch.Tensor]

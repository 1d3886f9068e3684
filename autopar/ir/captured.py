"""A captured model as data: the graph, what its placeholders stand for, and how a microbatch
divides the batch.
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
            Python numbers), ``"input"``, or ``"hoisted"`` (what is computed once for all
            microbatches).
        target: the name in the model; for an input where it was given, such as ``"input_ids"`` or
            ``"args[0]"``.
    """

    name: str
    kind: str
    target: str


@dataclass(frozen=True)
class BatchDivision:
    """How the graph of a microbatch divides the batch. Each node has ``meta["time"]``: R (it is the
    same for each microbatch), P (the microbatches' values add up), or S(d) (the microbatch's part).

    Attributes:
        samples: of a microbatch.
        shares: equal parts of the batch, of each of which a microbatch has a chunk; 1 unless the
            model takes the batch apart.
        room: into how many chunks each of them may go, so that samples which the model takes
            together stay together.
        each: the updates, by number, that each microbatch makes; others are those of the whole
            batch, made once.
        approximate: what is taken of each microbatch although that is not exact.
        tightest: what takes the most samples together; "" where nothing takes more than one.
    """

    samples: int
    parts: int
    max_chunks: int
    per_microbatch_updates: tuple[int, ...] = ()
    inexact_operators: tuple[str, ...] = ()
    limiting_operator: str = ""

    def chunks_per_part(self, microbatches: int, degree: int) -> int:
        """Into how many chunks each share goes, of each of which a microbatch has a chunk, where
        ``degree`` ranks split the batch.
        """
        return math.gcd(math.lcm(degree, self.parts) // self.parts, self.max_chunks // microbatches)


@dataclass
class CapturedModel:
    """A captured model.

    Attributes:
        graph: one placeholder for each of ``inputs``, in that order; the output node holds the flat
            user outputs (constants among them as they are), then the new values of ``updates``.
            Every node has ``meta["val"]`` (fake tensors of the global shape), ``meta["module"]``
            and ``meta["source"]``.
        in_spec: the pytree of ``(args, kwargs)`` as the user gives them; user inputs are in its
            flat order.
        constants_in: by flat position in ``in_spec``, what was given that is no tensor; such inputs
            have no placeholder.
        out_spec: the pytree of the user's outputs.
        loss: which of the flat user outputs is the loss, a scalar.
        updates: buffers whose new values the graph returns. Batch norm's running statistics are not
            among them: the operator itself writes to them.
        state: every parameter and buffer of the model under its first name, used or not, and the
            constants.
        aliases: further names of tied parameters and buffers, each with the name that ``state``
            has.
        notes: what a user should know.
        compute: the dtype that was asked for; None where the graph has the model's own dtypes.
        stored: by placeholder, the dtype of a tensor that the graph has in ``compute`` instead;
            empty once the graph is canonical, when only parameters are left, whose placeholders
            have it as ``meta["stored"]``.
        fingerprint: of the canonical graph of the whole batch, also where this is the graph of a
            part of it.
        division: of the graph of a microbatch, how the batch is divided.
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
    compute: torch.dtype | None = None
    stored: dict[str, torch.dtype] = field(default_factory=dict)
    fingerprint: str = ""
    division: BatchDivision | None = None

    @property
    def placeholders(self) -> dict[fx.Node, GraphInput]:
        """The placeholders of the graph, in order, each with its entry in ``inputs``."""
        return dict(zip(self.graph.find_nodes(op="placeholder"), self.inputs, strict=True))


LossFunction = Callable[[Any, Any], torch.Tensor]

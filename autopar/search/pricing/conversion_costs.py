"""The path, the seconds and the collectives of converting a node's tensor between layouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.fx as fx

from autopar.cost_model import AxisLinks, ConversionCosts, Term
from autopar.cost_model.conversion import Step
from autopar.ir.layout import Layout
from autopar.rules.analysis import Analysis


class NodeConversionCosts:
    """Conversions of the tensors of one graph on the mesh of one stage.

    Args:
        reduction_dtype: the dtype in which ranks sum gradients of parameters; None for the dtype of
            the gradient.
    """

    def __init__(
        self, analysis: Analysis, conversions: ConversionCosts, reduction_dtype: torch.dtype | None
    ) -> None:
        self._analysis, self._conversions = analysis, conversions
        self._reduction_dtype = reduction_dtype
        self._known: dict[tuple, np.ndarray] = {}

    @property
    def axes(self) -> list[AxisLinks]:
        """The links of each mesh axis."""
        return self._conversions.axes

    @property
    def pipeline(self) -> AxisLinks:
        """The links between pipeline stages."""
        return self._conversions.pipeline

    def seconds(
        self,
        node: fx.Node,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        backward: bool = True,
    ) -> np.ndarray:
        """Seconds of converting ``node``'s tensor in one microbatch, [source, target]; with
        ``backward`` those of converting the gradient are added. Tensors of one shape and dtype
        share the array.
        """
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            # The results of a node with several results are converted one by one, after getitem.
            return np.array(
                [[0.0 if source == target else np.inf for target in targets] for source in sources]
            )
        tensor = (
            tuple(value.shape),
            value.dtype.itemsize,
            backward and node in self._analysis.differentiable,
        )
        key = *tensor, self._summed_itemsize(node), tuple(sources), tuple(targets)
        if key not in self._known:
            layouts = list(dict.fromkeys([*sources, *targets]))
            place = {layout: i for i, layout in enumerate(layouts)}
            matrix = self._conversions.matrix(*tensor, layouts, self._summed_itemsize(node))
            rows, columns = [place[s] for s in sources], [place[t] for t in targets]
            self._known[key] = matrix[np.ix_(rows, columns)]
        return self._known[key]

    def path(self, node: fx.Node, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The cheapest steps that convert ``node``'s tensor, each along one mesh axis."""
        shape, itemsize, differentiable = self._tensor(node)
        return self._conversions.path(
            shape, itemsize, differentiable, source, target, self._summed_itemsize(node)
        )

    def terms(self, node: fx.Node, source: Layout, target: Layout) -> list[Term]:
        """The collectives and copies of :meth:`path`, forward and backward. There are none for a
        tensor that keeps its layout, or for a node with several results.
        """
        if source == target or not isinstance(node.meta["val"], torch.Tensor):
            return []
        shape, itemsize, differentiable = self._tensor(node)
        return self._conversions.terms(
            shape, itemsize, differentiable, source, target, self._summed_itemsize(node)
        )

    def _tensor(self, node: fx.Node) -> tuple[tuple[int, ...], int, bool]:
        value = node.meta["val"]
        differentiable = node in self._analysis.differentiable
        return tuple(value.shape), value.dtype.itemsize, differentiable

    def _summed_itemsize(self, node: fx.Node) -> int | None:
        """Bytes of one element where ranks sum ``node``'s gradient; None for the bytes of an
        element of the tensor. Only gradients of parameters have a dtype for their sum.
        """
        if self._reduction_dtype is None or node not in self._analysis.state:
            return None
        return self._reduction_dtype.itemsize

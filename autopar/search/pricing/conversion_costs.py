"""The path, the seconds and the collectives of converting a node's tensor between layouts.

Parameters that are gathered in a ZeRO bucket share one collective. Each pays its part of the
bucket's seconds, by its bytes. As long as a plan has no buckets, the bucket is taken to be as large
as it may be, and to be hidden as far as prefetch may hide it, so that no plan takes less than the
sum of these parts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.fx as fx

from autopar.cost_model import AxisLinks, ConversionCosts, Term, collective_seconds
from autopar.cost_model.conversion import Step
from autopar.ir.layout import Layout
from autopar.ir.zero_buckets import bucket_steps, is_small
from autopar.rules.analysis import Analysis
from autopar.search.pricing.layout_pairs import gathering_pairs, gathers, moving
from autopar.search.pricing.node_sizes import chunk_count
from autopar.search.pricing.step_prices import LEAST_EXPOSED, ExposedParts
from autopar.search.space.gather_groups import group_elements

_HIDDEN = "all_gather", "reduce_scatter"  # the collectives of a bucket, which computation hides


class NodeConversionCosts:
    """Conversions of the tensors of one graph on the mesh of one stage.

    Args:
        reduction_dtype: the dtype in which ranks sum gradients of parameters; None for the dtype of
            the gradient.
        overlap: the part of a hidden collective's seconds that is saved.
    """

    def __init__(
        self,
        analysis: Analysis,
        conversions: ConversionCosts,
        reduction_dtype: torch.dtype | None,
        overlap: float,
    ) -> None:
        self._analysis, self._conversions = analysis, conversions
        self._reduction_dtype = reduction_dtype
        least = max(1 - overlap, LEAST_EXPOSED)
        self._most_hidden = 1 - least
        self._exposed = ExposedParts(least, least, least)
        # of each parameter in a bucket, the elements of the bucket that a rank gathers
        self._bucket_elements: Mapping[fx.Node, float] = analysis.cached(group_elements)
        self._known: dict[tuple, np.ndarray] = {}
        # of one conversion in a bucket, and of one collective of a bucket
        self._bucket_seconds: dict[tuple, np.ndarray] = {}
        self._collective_seconds: dict[tuple[str, int, float], float] = {}

    def in_buckets(
        self, elements: Mapping[str, float], exposed: ExposedParts
    ) -> NodeConversionCosts:
        """The costs where the parameters of these names are in buckets of so many elements on a
        rank, of whose collectives ranks wait for the parts ``exposed``, and no others are in
        buckets.
        """
        other = self.exposed(exposed)
        state = self._analysis.state
        other._bucket_elements = {n: elements[n.name] for n in state if n.name in elements}
        return other

    def exposed(self, parts: ExposedParts) -> NodeConversionCosts:
        """The costs where ranks wait for these parts of the collectives of buckets."""
        other = copy.copy(self)
        other._exposed, other._known = parts, {}
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of the tables so far."""
        return sum(table.nbytes for table in self._known.values())

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
        """Seconds of converting ``node``'s tensor in one microbatch, [source, target], with those
        of converting the gradient; without ``backward`` those of converting the tensor again in the
        backward. Tensors of one shape and dtype share the array.
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
        bucket = self._bucket_elements.get(node)
        key = *tensor, self._summed_itemsize(node), bucket, tuple(sources), tuple(targets)
        if key not in self._known:
            layouts = list(dict.fromkeys([*sources, *targets]))
            place = {layout: i for i, layout in enumerate(layouts)}
            matrix = self._conversions.matrix(*tensor, layouts, self._summed_itemsize(node))
            rows, columns = [place[s] for s in sources], [place[t] for t in targets]
            found = matrix[np.ix_(rows, columns)]
            if bucket is not None:
                found = found - self._saved_by_bucket(node, sources, targets, backward)
            self._known[key] = found
        return self._known[key]

    def hidden(
        self,
        node: fx.Node,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        beside: np.ndarray,
    ) -> np.ndarray:
        """Seconds for which ranks do not wait for the gradient of ``node``'s tensor, because they
        compute ``beside`` it, [source, target]. Ranks wait for a parameter's if they do more with
        it than sum it.

        Args:
            beside: seconds of computation, [target].
        """
        both = self.seconds(node, sources, targets)
        forward = self.seconds(node, sources, targets, backward=False)
        possible = np.isfinite(both) & np.isfinite(forward)
        if node in self._analysis.state:
            possible &= ~moving(tuple(sources), tuple(targets))
        backward = np.subtract(both, forward, out=np.zeros_like(both), where=possible)
        return self._most_hidden * np.minimum(np.maximum(backward, 0.0), beside)

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

    def terms_in_graph(
        self,
        node: fx.Node,
        source: Layout,
        target: Layout,
        again: bool = False,
        beside: float = 0.0,
    ) -> list[Term]:
        """:meth:`terms` of a conversion in the graph, with the parameter's part of its bucket; or
        those of the conversion that the backward makes ``again``. Of a gradient they are those for
        which ranks wait, where they compute for ``beside`` seconds meanwhile.
        """
        found = self.terms(node, source, target)
        if again:
            found = [term for term in found if term.phase == "forward"]
        elif beside:
            found = self._waited_for(found, node, source, target, beside)
        if not self._is_in_bucket(node, source, target):
            return found
        exposed = self._exposed.of_kinds(again)
        return [
            replace(part, seconds=exposed.get(part.kind, 1.0) * part.seconds)
            for term in found
            for part in self._parts(node, target, term)
        ]

    def _waited_for(
        self,
        found: list[Term],
        node: fx.Node,
        source: Layout,
        target: Layout,
        beside: float,
    ) -> list[Term]:
        """The terms of a conversion, less what is :meth:`hidden` of those of the gradient."""
        hidden = float(self.hidden(node, [source], [target], np.array([beside]))[0, 0])
        backward = sum(term.seconds for term in found if term.phase == "backward")
        exposed = max(0.0, 1 - hidden / backward) if backward else 1.0
        return [
            replace(term, seconds=exposed * term.seconds) if term.phase == "backward" else term
            for term in found
        ]

    def _parts(self, node: fx.Node, target: Layout, term: Term) -> list[Term]:
        """What becomes of a term in the bucket of a parameter that is gathered to ``target``, with
        all of its seconds.
        """
        if term.kind not in _HIDDEN:
            return [term]
        own = node.meta["val"].numel() / chunk_count(target, self._conversions.sizes)
        ratio = max(1.0, self._bucket_elements[node] / own)
        axis, nbytes = self.axes[term.axis], term.nbytes * ratio
        key = term.kind, term.axis, nbytes
        if key not in self._collective_seconds:
            self._collective_seconds[key] = float(collective_seconds(term.kind, nbytes, axis))
        parts = [replace(term, seconds=self._collective_seconds[key] / ratio)]
        if term.kind == "reduce_scatter" and is_small(term.nbytes):  # copied to others, and back
            copied = 2 * term.nbytes * (1 + 1 / axis.size)
            taken = float(self._conversions.copy_seconds(copied))
            parts.append(Term("copy", term.axis, copied, taken, term.phase))
        return parts

    def _saved_by_bucket(
        self, node: fx.Node, sources: Sequence[Layout], targets: Sequence[Layout], backward: bool
    ) -> np.ndarray:
        """Seconds that a parameter saves because it is gathered in a bucket, [source, target]."""
        saved = np.zeros((len(sources), len(targets)))
        own = *self._tensor(node), self._summed_itemsize(node), self._bucket_elements.get(node)
        exposed = self._exposed.of_kinds(again=not backward)
        weights = np.array([1.0, *(-exposed[kind] for kind in _HIDDEN)])
        for i, j in gathering_pairs(tuple(sources), tuple(targets)):
            key = *own, sources[i], targets[j]
            if key not in self._bucket_seconds:
                self._bucket_seconds[key] = self._seconds_by_kind(node, sources[i], targets[j])
            saved[i, j] = weights @ self._bucket_seconds[key][int(backward)]
        return saved

    def _seconds_by_kind(self, node: fx.Node, source: Layout, target: Layout) -> np.ndarray:
        """Seconds of one conversion, where the backward makes it again, and where it is made first,
        [0 or 1, kind]: first those that it takes alone, without those of copies in its bucket; then
        those of each of ``_HIDDEN`` in the bucket. All are 0 where no bucket takes it.
        """
        found = np.zeros((2, 1 + len(_HIDDEN)))
        if not self._is_in_bucket(node, source, target):
            return found
        for term in self.terms(node, source, target):
            rows = [0, 1] if term.phase == "forward" else [1]
            found[rows, 0] += term.seconds
            for part in self._parts(node, target, term):
                if part.kind in _HIDDEN:
                    found[rows, 1 + _HIDDEN.index(part.kind)] += part.seconds
                else:
                    found[rows, 0] -= part.seconds
        return found

    def _is_in_bucket(self, node: fx.Node, source: Layout, target: Layout) -> bool:
        """Whether a bucket takes the conversion of a parameter."""
        if node not in self._bucket_elements or not gathers(source, target):
            return False
        steps = self.path(node, source, target)
        return bucket_steps((axis, repr(s), repr(t)) for axis, s, t in steps) is not None

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

"""What the options ``recompute`` and ``offload`` leave of the ways to have a result in the
backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import cache

import torch
import torch.fx as fx

from autopar.ir.nodes import operands
from autopar.memory.saved_tensors import SavedTensors
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.space.repeated_blocks import block_of

aten = torch.ops.aten

# The states of a result: freed after the forward; saved until the backward; freed and then
# recomputed in the backward from operands that are there; or saved in the memory of the host.
FREED, SAVED, RECOMPUTED, OFFLOADED = range(4)
RECOMPUTE_OPTIONS = ("auto", "none", "selective", "full")


class RecomputePolicy:
    """The states that results may have.

    "auto" leaves all states to the search. "none" recomputes nothing. "full" saves what leaves a
    repeated block and recomputes everything else in it: Megatron's full recomputation, which is
    also ``torch.utils.checkpoint`` around each block.

    "selective" saves besides the results of attention and of the first, third, fifth … product by a
    matrix of each block. It is torchtitan's selective activation checkpointing of operators
    (``selective_ac_option="op"``, arXiv 2410.06511; ``_apply_ac_to_transformer_block`` of its
    ``parallelize_llama.py``), which counts ``aten.mm``. Where ranks sum a product, its sum is saved
    in its place, as torchtitan saves the results of reduce-scatters.

    Args:
        option: of ``recompute``.
        offloads: whether the host may keep what would be saved.
    """

    def __init__(self, option: str, offloads: bool = False) -> None:
        self.option, self.offloads = option, offloads
        self._recomputes_blocks = option in ("selective", "full")
        self._saved_products = cache(saved_products)  # by graph

    def states(self, node: fx.Node, saved: SavedTensors) -> tuple[int, ...]:
        """The states that the result of a call with memory of its own may have.

        Args:
            saved: what autograd saves of the call. A result that autograd saves is never freed.
        """
        freed = () if saved.output else (FREED,)
        if node.target is send:  # the result comes from another device
            return (SAVED, *freed)
        if self._is_recomputed_with_block(node):
            return (RECOMPUTED,) if saved.nbytes else (RECOMPUTED, *freed)
        kept = (SAVED, OFFLOADED) if self.offloads else (SAVED,)
        return (*kept, RECOMPUTED, *freed) if self.option == "auto" else (*kept, *freed)

    def conversions(self, node: fx.Node, readers: Collection[fx.Node]) -> tuple[bool, bool]:
        """Whether results of conversions of a node's tensor may be saved for its readers, and
        whether they may be recomputed.
        """
        if self._recomputes_blocks:
            recomputed = any(block_of(reader) for reader in readers)
            recomputed &= self.option == "full" or not _is_product(node)
            return not recomputed, recomputed
        return True, self.option == "auto"

    def _is_recomputed_with_block(self, node: fx.Node) -> bool:
        if not self._recomputes_blocks or not _is_inside_block(node):
            return False
        if self.option == "full":
            return True
        is_attention = node.target is aten.scaled_dot_product_attention.default
        return not is_attention and node not in self._saved_products(node.graph)


def saved_products(graph: fx.Graph) -> set[fx.Node]:
    """The products whose results "selective" saves: every second one of each repeated block, from
    the first one on.
    """
    counts, saved = Counter[str](), set[fx.Node]()
    for node in graph.nodes:
        if _is_product(node) and (block := block_of(node)) is not None:
            counts[block] += 1
            if counts[block] % 2 == 1:
                saved.add(node)
    return saved


def _is_product(node: fx.Node) -> bool:
    """Whether a call multiplies by a matrix, which torch does with ``aten.mm`` or ``aten.addmm``.
    Products of batches of matrices are not counted.
    """
    if node.target in (aten.linear.default, aten.mm.default, aten.addmm.default):
        return True
    return node.target is aten.matmul.default and operands(node)[1][0].meta["val"].dim() == 2


def _is_inside_block(node: fx.Node) -> bool:
    """Whether a node is part of a block, and all its readers are part of the same block."""
    block = block_of(node)
    return block is not None and all(block_of(user) == block for user in node.users)

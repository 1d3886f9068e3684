"""What the options ``recompute`` and ``offload`` leave of the ways to have a result in the
backward.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.fx as fx

from autopar.memory.saved_tensors import SavedTensors
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.space.repeated_blocks import block_of

# The states of a result: freed after the forward; saved until the backward; freed and then
# recomputed in the backward from operands that are there; or saved in the memory of the host.
FREED, SAVED, RECOMPUTED, OFFLOADED = range(4)
RECOMPUTE_OPTIONS = ("auto", "none", "full")


class RecomputePolicy:
    """The states that results may have.

    "auto" leaves all states to the search. "none" recomputes nothing. "full" saves what leaves a
    repeated block and recomputes everything else in it: Megatron's full recomputation, which is
    also ``torch.utils.checkpoint`` around each block.

    Args:
        option: of ``recompute``.
        offloads: whether the host may keep what would be saved.
    """

    def __init__(self, option: str, offloads: bool = False) -> None:
        self.option, self.offloads = option, offloads

    def states(self, node: fx.Node, saved: SavedTensors) -> tuple[int, ...]:
        """The states that the result of a call with memory of its own may have.

        Args:
            saved: what autograd saves of the call. A result that autograd saves is never freed.
        """
        freed = () if saved.output else (FREED,)
        if node.target is send:  # the result comes from another device
            return (SAVED, *freed)
        if self.option == "full" and self._is_inside_block(node):
            return (RECOMPUTED,) if saved.nbytes else (RECOMPUTED, *freed)
        kept = (SAVED, OFFLOADED) if self.offloads else (SAVED,)
        return (*kept, RECOMPUTED, *freed) if self.option == "auto" else (*kept, *freed)

    def conversions(self, node: fx.Node, readers: Collection[fx.Node]) -> tuple[bool, bool]:
        """Whether results of conversions of a node's tensor may be saved for its readers, and
        whether they may be recomputed.
        """
        if self.option == "full":
            in_block = any(block_of(reader) for reader in readers)
            return not in_block, in_block
        return True, self.option == "auto"

    def _is_inside_block(self, node: fx.Node) -> bool:
        """Whether a node is part of a block, and all its readers are part of the same block."""
        block = block_of(node)
        return block is not None and all(block_of(user) == block for user in node.users)

"""What may become of a result until the backward: kept, let go, or made again from operands that
are there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch.fx as fx

from autopar.memory.saved_tensors import SavedTensors
from autopar.runtime.kernels.graph_kernels import send
from autopar.search.space.repeated_blocks import block_of

FREED, SAVED, RECOMPUTED = range(3)
MODES = ("auto", "none", "full")


class RecomputePolicy:
    """``mode``: "auto" leaves everything to the search; "none" makes nothing again; "full" keeps
    what leaves a repeated block, and makes everything else of it again (what Megatron calls full,
    and ``torch.utils.checkpoint`` around each block does)."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def states(self, node: fx.Node, saved: SavedTensors) -> tuple[int, ...]:
        """Those of a call that makes memory of its own."""
        gone = () if saved.output else (FREED,)
        if node.target is send:  # it came from another device
            return (SAVED, *gone)
        if self.mode == "full" and self._inside(node):
            return (RECOMPUTED, *gone) if not saved.nbytes else (RECOMPUTED,)
        return (SAVED, RECOMPUTED, *gone) if self.mode == "auto" else (SAVED, *gone)

    def conversions(self, node: fx.Node, readers: Collection[fx.Node]) -> tuple[bool, bool]:
        """Whether conversions of a tensor may be kept, and whether they may be made again."""
        if self.mode == "full":
            blocks = any(block_of(reader) for reader in readers)
            return not blocks, blocks
        return True, self.mode == "auto"

    def _inside(self, node: fx.Node) -> bool:
        """Whether a node is part of a block, which nothing outside reads it of."""
        block = block_of(node)
        return block is not None and all(block_of(user) == block for user in _readers(node))


def _readers(node: fx.Node) -> Sequence[fx.Node]:
    return list(node.users)

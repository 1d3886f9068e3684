"""The blocks of a model, such as its transformer layers, in the order of a graph."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch.fx as fx

# "model.layers.7" of "model.layers.7.mlp.up_proj": up to the first number for a name.
_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.)")


def number_blocks(calls: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """For each call of a graph, or of a stage, the number of its block.

    A block is a module with a number for a name that has modules of its own. All calls of a block
    have one number. So have the calls before the first block, with those that need no block's
    results, such as tables of rotary embeddings: 0. The calls after the last block have the
    highest number. Other calls outside of blocks count to the block before.
    """
    paths = [str(call.meta.get("module") or "") for call in calls]
    blocks = {found[0] for path in paths if (found := _BLOCK.match(path))}
    last = max((i for i, path in enumerate(paths) if _block(path) in blocks), default=-1)
    numbers, current, number = dict[fx.Node, int](), "", 0
    for i, (call, path) in enumerate(zip(calls, paths, strict=True)):
        if (block := _block(path)) in blocks:
            number, current = number + (block != current), block
            numbers[call] = number
        elif i > last:
            numbers[call] = number + bool(blocks)
        else:
            needs_block = any(numbers.get(n, 0) for n in call.all_input_nodes)
            numbers[call] = number if needs_block else 0
    return numbers


def _block(path: str) -> str:
    found = _BLOCK.match(path + ".")
    return found[0] if found else ""

"""Convolutions. A rank that has a chunk of a spatial dim needs a halo: some elements of the
neighbouring chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule


class Window(NamedTuple):
    """The windows of a convolution along one spatial dim, in elements.

    Attributes:
        stride: from one window to the next.
        dilation: from one element of a window to the next.
        padding: before and after the input.
        reach: from the first element of a window to its last one.
    """

    stride: int
    dilation: int
    padding: tuple[int, int]
    reach: int

    @property
    def halo(self) -> tuple[int, int]:
        """The elements that a chunk needs of the chunks before and after it, for an input that has
        ``stride`` times as many elements as the output. The last window begins
        ``stride + padding[0]`` elements before the chunk's end.
        """
        left = self.padding[0]
        return left, max(self.reach - left - (self.stride - 1), 0)


def windows(arguments: Mapping[str, Any], kernel: Sequence[int]) -> list[Window]:
    """The windows along each spatial dim of a convolution.

    Args:
        arguments: of the call, by name.
        kernel: the spatial shape of the weight.
    """

    def each(name: str) -> list[int]:
        value = arguments[name]
        given = [value] if isinstance(value, int) else list(value)
        return given * len(kernel) if len(given) == 1 else given

    reaches = [d * (w - 1) for d, w in zip(each("dilation"), kernel, strict=True)]
    padding = arguments["padding"]
    if padding == "same":  # an odd element goes after the input
        sides = [(n // 2, n - n // 2) for n in reaches]
    else:
        sides = [(n, n) for n in (each("padding") if padding != "valid" else [0] * len(kernel))]
    return [Window(*w) for w in zip(each("stride"), each("dilation"), sides, reaches, strict=True)]


@register_rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def transposed_convolution(call: OperatorCall) -> Rule | None:
    """Spatial dims stay whole, because windows overlap in the result."""
    image, weight, groups = call.shapes[0], call.shapes[1], call["groups"]
    if len(image) != len(weight):  # the input has no batch dim
        return None
    x, y, k = ([f"{name}{i}" for i in range(len(weight) - 2)] for name in "xyk")
    return call.rule(
        f"n (g c) {' '.join(x)}, (g c) o {' '.join(k)} + (g o) -> n (g o) {' '.join(y)}",
        sizes={"g": groups},
        # Ranks split either the groups, or the channels of a single group.
        whole=[*x, *y, *k, *(["c", "o"] if groups > 1 else [])],
        flops=2.0 * math.prod(image) * math.prod(weight[1:]),
        kind="conv",
        localise=partial(_fewer_groups, groups) if groups > 1 else None,
    )


def _fewer_groups(groups: int, arguments: dict[str, Any], splits: dict[str, int]) -> dict[str, Any]:
    """The number of groups on a rank."""
    return {"groups": groups // splits.get("g", 1)}


@register_rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def convolution(call: OperatorCall) -> Rule | None:
    """A spatial dim may be split if its size is the stride times the number of windows. The dim is
    then the product of ``y``, the factor of the output, and ``s``, the stride.
    """
    if len(call.shapes[0]) != len(call.shapes[1]):  # the input has no batch dim
        return None
    groups, image, weight = call["groups"], call.shapes[0], call.shapes[1]
    along = dict(enumerate(windows(call.arguments, weight[2:])))
    fits = {i: w for i, w in along.items() if image[2 + i] == w.stride * call.shape[2 + i]}
    halos = {i: w.halo for i, w in fits.items() if any(w.halo)}
    x = " ".join(f"(y{i} s{i})" if i in fits else f"x{i}" for i in along)
    y, k = (" ".join(f"{name}{i}" for i in along) for name in "yk")
    by_dim = ([f"k{i}", f"s{i}", *([] if i in fits else [f"x{i}", f"y{i}"])] for i in along)
    return call.rule(
        f"n (g c) {x}, (g o) c {k} + (g o) -> n (g o) {y}",
        sizes={"g": groups, **{f"s{i}": w.stride for i, w in fits.items()}},
        whole=[
            *chain(*by_dim),
            *(["c", "o"] if groups > 1 else []),
        ],  # a group is not split further
        least={
            f"y{i}": -(-max(halo) // along[i].stride) for i, halo in halos.items()
        },  # a halo comes from one neighbour
        kernels={f"y{i}": "conv_halo" for i in halos},
        composed=frozenset({"conv_halo"}),
        flops=2.0 * math.prod(call.shape) * math.prod(weight[1:]),
        kind="conv",
        localise=partial(_fewer_groups, groups) if groups > 1 else None,
    )

"""Convolutions. Where their space is cut each rank needs a halo: some elements of the chunks beside
its own.
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
    """How a convolution goes along one dim: elements of padding on either side, and from a window's
    first element to its last.
    """

    stride: int
    dilation: int
    padding: tuple[int, int]
    reach: int

    @property
    def halo(self) -> tuple[int, int]:
        """What a chunk needs of the ones before and after it, where outputs times stride are
        inputs: its last window begins at ``stride`` from its end, less the padding."""
        left = self.padding[0]
        return left, max(self.reach - left - (self.stride - 1), 0)


def windows(arguments: Mapping[str, Any], kernel: Sequence[int]) -> list[Window]:
    """Of each spatial dim of a convolution with these arguments, whose weight has the spatial shape
    ``kernel``.
    """

    def each(name: str) -> list[int]:
        value = arguments[name]
        given = [value] if isinstance(value, int) else list(value)
        return given * len(kernel) if len(given) == 1 else given

    reaches = [d * (w - 1) for d, w in zip(each("dilation"), kernel, strict=True)]
    padding = arguments["padding"]
    if padding == "same":  # the odd one on the right
        sides = [(n // 2, n - n // 2) for n in reaches]
    else:
        sides = [(n, n) for n in (each("padding") if padding != "valid" else [0] * len(kernel))]
    return [Window(*w) for w in zip(each("stride"), each("dilation"), sides, reaches, strict=True)]


@register_rule("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d")
def transposed(call: OperatorCall) -> Rule | None:
    """Space stays whole: windows overlap in the result."""
    image, weight, groups = call.shapes[0], call.shapes[1], call["groups"]
    if len(image) != len(weight):  # no batch dim
        return None
    x, y, k = ([f"{name}{i}" for i in range(len(weight) - 2)] for name in "xyk")
    return call.rule(
        f"n (g c) {' '.join(x)}, (g c) o {' '.join(k)} + (g o) -> n (g o) {' '.join(y)}",
        sizes={"g": groups},
        whole=[*x, *y, *k, *(["c", "o"] if groups > 1 else [])],  # a group is not split further
        flops=2.0 * math.prod(image) * math.prod(weight[1:]),
        kind="conv",
        localise=partial(_fewer_groups, groups) if groups > 1 else None,
    )


def _fewer_groups(groups: int, arguments: dict[str, Any], splits: dict[str, int]) -> dict[str, Any]:
    return {"groups": groups // splits.get("g", 1)}


@register_rule("aten.conv1d", "aten.conv2d", "aten.conv3d")
def convolution(call: OperatorCall) -> Rule | None:
    """Space is cut where it gives as many windows as it has strides: ``s`` is then the stride, and
    ``y`` what both sides share.
    """
    if len(call.shapes[0]) != len(call.shapes[1]):  # no batch dim
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

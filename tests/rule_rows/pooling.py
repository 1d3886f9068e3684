"""Rows of pooling and upsampling, whose rules are in ``autopar/rules/pooling.py``."""

from __future__ import annotations

import torch
from emulate import Row

from rule_rows.operands import Operands, aten, row

operands = Operands()
n = operands.n
SPACES: dict[str, tuple[int, ...]] = {"1": (8,), "2": (4, 6), "3": (2, 4, 4)}

ROWS: list[Row] = [
    row(aten.max_pool2d.default, n(4, 6, 4, 4), [2, 2]),
    row(aten.avg_pool2d.default, n(4, 6, 4, 4), [2, 2]),
    row(aten.adaptive_avg_pool2d.default, n(4, 6, 6, 6), [2, 2]),
    row(aten.upsample_nearest2d.vec, n(4, 6, 2, 2), None, [2.0, 2.0]),
    row(aten.upsample_bilinear2d.vec, n(4, 6, 2, 2), [4, 4], False, None),
]
MORE: list[Row] = [
    *(
        row(getattr(aten, f"adaptive_{kind}_pool{d}d").default, n(4, 6, *space), [2] * int(d))
        for d, space in SPACES.items()
        for kind in ("avg", "max")
    ),
    *(
        row(getattr(aten, f"{kind}_pool{d}d").default, n(4, 6, *space), [2] * int(d))
        for d, space in SPACES.items()
        for kind in ("avg", "max")
    ),
    *(
        row(getattr(aten, f"max_pool{d}d_with_indices").default, n(4, 6, *space), [2] * int(d))
        for d, space in SPACES.items()
    ),
    *(
        row(
            getattr(aten, f"_upsample_nearest_exact{d}d").vec, n(4, 6, *space), None, [2.0] * int(d)
        )
        for d, space in SPACES.items()
    ),
    *(
        row(getattr(aten, f"upsample_nearest{d}d").vec, n(4, 6, *SPACES[d]), None, [2.0] * int(d))
        for d in "13"
    ),
    *(
        row(
            getattr(aten, f"upsample_{kind}").vec,
            n(4, 6, *SPACES[kind[-2]]),
            None,
            False,
            [2.0] * int(kind[-2]),
        )
        for kind in ("linear1d", "bicubic2d", "trilinear3d")
    ),
    row(aten.max_pool2d.default, n(6, 4, 4), [2, 2]),
    row(aten.avg_pool3d.default, n(6, 2, 4, 4), [2, 2, 2]),
    row(
        aten.max_unpool2d.default,
        n(4, 6, 2, 2),
        torch.arange(0, 16, 4).expand(4, 6, 4).reshape(4, 6, 2, 2),
        [4, 4],
    ),
    row(
        aten.max_unpool3d.default,
        n(4, 6, 1, 2, 2),
        torch.arange(0, 16, 4).expand(4, 6, 4).reshape(4, 6, 1, 2, 2),
        [1, 4, 4],
        [1, 2, 2],
        [0, 0, 0],
    ),
    row(aten.unfold.default, n(4, 8, 6), 1, 4, 2),
    row(aten.im2col.default, n(4, 6, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]),
    row(aten.im2col.default, n(6, 4, 4), [2, 2], [1, 1], [1, 1], [1, 1]),
    row(aten.col2im.default, n(4, 24, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
    row(aten.pixel_shuffle.default, n(4, 24, 3, 2), 2),
    row(aten.pixel_unshuffle.default, n(4, 6, 4, 2), 2),
    row(aten.channel_shuffle.default, n(4, 6, 2, 2), 3),
    row(aten.grid_sampler_2d.default, n(4, 6, 3, 3), n(4, 2, 6, 2) * 0.4, 0, 0, True),
    row(aten.grid_sampler_3d.default, n(4, 2, 3, 3, 2), n(4, 2, 2, 3, 3) * 0.4, 0, 0, True),
    row(aten.affine_grid_generator.default, n(6, 2, 3), [6, 4, 3, 2], True),
]

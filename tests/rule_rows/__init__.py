"""Every registered operator with examples of its arguments: a file of rows for each file of rules.

All options of the operators in ``ROWS`` are tried on every mesh. ``MORE`` are families of similar
operators: all options along one axis are tried, and some along two.
"""

from __future__ import annotations

from emulate import Row

from rule_rows import (
    attention,
    convolution,
    elementwise,
    fourier,
    indexing,
    linear_algebra,
    loss,
    matmul,
    normalisation,
    pooling,
    recurrent,
    reduce,
    several_results,
    views,
    writing,
)

FAMILIES = (
    attention,
    convolution,
    elementwise,
    fourier,
    indexing,
    linear_algebra,
    loss,
    matmul,
    normalisation,
    pooling,
    recurrent,
    reduce,
    several_results,
    views,
    writing,
)
ROWS: tuple[Row, ...] = tuple(row for family in FAMILIES for row in family.ROWS)
MORE: tuple[Row, ...] = tuple(row for family in FAMILIES for row in family.MORE)

"""A problem with fewer choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.search.ilp.problem import Problem


def restrict_choices(problem: Problem, numbers: Sequence[np.ndarray]) -> Problem:
    """The problem with only the choices of these numbers, for each vertex."""
    vertices = [v.with_choices(left) for v, left in zip(problem.vertices, numbers, strict=True)]
    return replace(problem, vertices=vertices)

"""The placements of a configuration: the orders that its mesh axes and its pipeline may have, from
the slowest links to the fastest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.cost_model import Cluster
from autopar.errors import PlanError
from autopar.ir.plan_data import PIPELINE
from autopar.search.space.configuration import Configuration
from autopar.search.space.meshes import Axis
from autopar.search.space.options import Options


def placements(configuration: Configuration, options: Options) -> list[Configuration]:
    """The configurations that place the axes and the pipeline of an open one. First the pipeline
    crosses the slowest links, then the data axis; the axes of a mode stay together in their order.

    Raises:
        PlanError: the option ``placement`` leaves none.
    """
    pipeline, axes = configuration.pipeline, configuration.axes
    is_fixed = any(a.mode is not None and a.mode.fixed_ranks for a in axes)
    # Constraints are layouts, which name types in the order of the axes.
    is_ordered = is_fixed or (bool(options.constraints) and options.placement is None)
    orders = [axes] if is_ordered else _orders(axes)
    places = range(1 if pipeline == 1 or is_fixed else len(axes) + 1)
    placed = [replace(configuration, axes=order, place=k) for order in orders for k in places]
    if options.placement is None:
        return placed
    kept = [c for c in placed if is_placed_as(c, options.placement)]
    if not kept:
        raise _placement_error(configuration, options.placement, is_fixed)
    return kept[:1]


def check_kinds(configuration: Configuration, cluster: Cluster) -> None:
    """Raises PlanError where a stage of a pipeline would have devices of several kinds."""
    ranks = math.prod(configuration.sizes)
    for kind, count in cluster.parts if configuration.pipeline > 1 else ():
        if count % ranks:
            raise PlanError(
                f"a pipeline of {configuration.pipeline} has stages of {ranks} devices, which do "
                f"not divide the {count} of {kind.name!r}: a stage's devices are of one kind"
            )


def kind_orders(
    configuration: Configuration, cluster: Cluster, options: Options
) -> list[Configuration]:
    """The configurations that place an open one on a cluster of several kinds of devices: each
    pipeline rank lies in the devices of one kind, and the kinds follow each other in any order.

    Raises:
        PlanError: the option ``placement`` has the pipeline elsewhere than over the slowest links.
    """
    ranks = math.prod(configuration.sizes)
    places = [c for c in placements(configuration, options) if c.place == 0]
    if not places:
        raise PlanError(
            f"placement={options.placement}: where devices are of several kinds, the pipeline "
            f"crosses the slowest links, so that each stage has one kind: give {PIPELINE!r} first"
        )
    counts = [count // ranks for _, count in cluster.parts]
    orders = itertools.permutations(range(len(counts)))
    kinds = [tuple(k for k in order for _ in range(counts[k])) for order in orders]
    return [replace(c, kinds=each) for c in places for each in kinds]


def _orders(axes: tuple[Axis, ...]) -> list[tuple[Axis, ...]]:
    """The axes with the data axis first, and with it last."""
    data = tuple(a for a in axes if a.use == "data")
    others = tuple(a for a in axes if a.use != "data")
    return list(dict.fromkeys([(*data, *others), (*others, *data)]))


def placement_names(configuration: Configuration) -> list[str]:
    """The names of the option ``placement`` for the order of a placed configuration, without axes
    of one rank. All axes of a mode have the name "tensor".
    """
    assert configuration.place is not None
    names = [(a.size, "tensor" if a.use == "tensor" else a.name) for a in configuration.axes]
    names.insert(configuration.place, (configuration.pipeline, PIPELINE))
    return list(dict.fromkeys(name for size, name in names if size > 1))


def is_placed_as(configuration: Configuration, placement: Sequence[str]) -> bool:
    """Whether a placed configuration has the order that the user asks for."""
    names = placement_names(configuration)
    return names == [name for name in placement if name in names]


def _placement_error(
    configuration: Configuration, placement: Sequence[str], is_fixed: bool
) -> PlanError:
    names = placement_names(replace(configuration, place=0))
    if is_fixed:
        mode = next(a.mode for a in configuration.axes if a.mode is not None)
        return PlanError(
            f"placement={tuple(placement)}: the mode {mode.name!r} says itself which ranks its "
            f"groups have, which is the order {', '.join(names)}: leave placement out"
        )
    return PlanError(
        f"placement={tuple(placement)} does not order {', '.join(names)}: give each of these names "
        "once, slowest links first"
    )

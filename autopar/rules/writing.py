"""Operators that write to places of a tensor which an index names. The dims that the index counts
are whole; other dims are independent.

Operators that add to the places sum over the added elements, so that these may be split: the result
is a pending sum. Operators that overwrite the places may not be split so, because two ranks might
write to one place, and the last write must win.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from autopar.rules.registry import OperatorCall, register_rule
from autopar.rules.rule import Rule


@register_rule("aten.index_add", "aten.index_copy", "aten.index_fill", "aten.index_reduce")
def write_along_dim(call: OperatorCall) -> Rule | None:
    n, (dim,) = len(call.shape), call.dims("dim")
    if not n or any(len(s) not in (1, n) for s in call.shapes[1:]):
        return None
    this, source = (" ".join(x if d == dim else f"d{d}" for d in range(n)) for x in "vi")
    if call.name == "aten.index_add":
        return call.rule(f"{this}, ~i + {source} -> {this}", whole="v")
    rest = (
        [f"~{source}"]
        if len(call.inputs) == 3 and call.shapes[2]
        else ["~"] * (len(call.inputs) - 2)
    )
    return call.rule(f"{', '.join([f'~{this}', '~i', *rest])} -> {this}", whole="vi")


@register_rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(call: OperatorCall) -> Rule | None:
    """A dim in which the index has the size of both tensors is independent. In other dims the index
    names a part of the tensors.
    """
    n, (dim,) = len(call.shape), call.dims("dim")
    if not n or any(len(s) != n for s in call.shapes):
        return None
    apart = [d for d in range(n) if d != dim and len({s[d] for s in call.shapes}) == 1]

    def names(letter: str) -> list[str]:
        return [f"d{d}" if d in apart else f"{letter}{d}" for d in range(n)]

    this, index, source = names("v"), names("i"), names("j")
    whole = {*this, *index, *source} - {f"d{d}" for d in apart}
    texts = [" ".join(dims) for dims in (this, index, source)[: len(call.inputs)]]
    if call.name == "aten.scatter_add":
        return call.rule(f"{texts[0]}, ~{texts[1]} + {texts[2]} -> {texts[0]}", whole=whole)
    return call.rule(f"{', '.join('~' + t for t in texts)} -> {texts[0]}", whole=whole)


@register_rule("aten.index_put")
def index_put(call: OperatorCall) -> Rule | None:
    """The indices are of adjacent dims; or a mask names places that all get one number."""
    given = call["indices"]
    places = [d for d, i in enumerate(given) if isinstance(i, fx.Node)]
    masks = [given[d].meta["val"].dtype == torch.bool for d in places]
    if masks == [True] and places == [0]:
        return _masked(call)
    if any(masks) or not places or places != list(range(places[0], places[-1] + 1)):
        return None
    *indices, values = call.shapes[1:]
    names, into = (
        [f"d{d}" for d in range(len(call.shape))],
        [f"b{k}" for k in range(max(map(len, indices)))],
    )
    this = " ".join(f"v{d}" if d in places else name for d, name in enumerate(names))
    texts = [" ".join(into[len(into) - len(s) :]) for s in indices]
    written = [*names[: places[0]], *into, *names[places[-1] + 1 :]]
    length = dict(zip(into, torch.broadcast_shapes(*indices), strict=True))
    sizes = {**length, **{name: call.shape[d] for d, name in enumerate(names) if d not in places}}
    source = " ".join(written[len(written) - len(values) :])
    whole = [f"v{d}" for d in places]
    if not call["accumulate"]:
        return call.rule(
            f"{', '.join('~' + s for s in (this, *texts, source))} -> {this}",
            whole=[*whole, *into],
            sizes=sizes,
        )
    if values != tuple(sizes[x] for x in written):  # one value goes to several places
        whole += into
    return call.rule(
        f"{this}, {', '.join('~' + s for s in texts)} + {source} -> {this}",
        whole=whole,
        sizes=sizes,
    )


def _masked(call: OperatorCall) -> Rule | None:
    """A mask of the first dims names the places that get one number."""
    _, mask, values = call.shapes
    if set(values) - {1}:
        return None
    names = [f"d{d}" for d in range(len(call.shape))]
    return call.rule(
        f"~{' '.join(names)}, ~{' '.join(names[: len(mask)])}, ~{' '.join('1' * len(values))} -> "
        f"{' '.join(names)}"
    )

"""Bytes that this rank receives in the collectives that run inside a ``with``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Received(TorchDispatchMode):
    """Counts what this rank receives, as if each collective were one that moves no more than it
    must.

    Of ``n`` ranks: an all-gather ``n - 1`` times what each has, a reduce-scatter ``n - 1`` times
    what each ends with, an all-reduce ``2 (n - 1) / n`` of its tensor, an all-to-all what comes
    from others, a broadcast its tensor on every rank but the source, a reduction to one rank, which
    is a broadcast in reverse, its tensor on every rank but that one. Functional collectives and
    those of ``torch.distributed``, also in a backward that runs in this thread, as it does on CPUs;
    not what is only traced.

    Attributes: ``by_kind``, bytes of "all_reduce", "all_gather", "reduce_scatter", "all_to_all",
    "broadcast", "reduce" and "receive" (of one rank's message), without those that there were none
    of; ``total``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            given = {
                a.name: value for a, value in zip(func._schema.arguments, args, strict=False)
            } | (kwargs or {})
            count = next(
                count
                for prefix, count in _COUNTED.items()
                if name.replace("_", "").startswith(prefix)
            )
            if count and not any(isinstance(t, FakeTensor) or t.is_meta for t in _tensors(given)):
                kind, nbytes = count.__name__, count(_Call(given))
                self.by_kind[kind] = self.by_kind.get(kind, 0) + nbytes
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


class _Call:
    """A collective's arguments, under whichever names it has them, and its group."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        name = given.get("group_name")
        if "process_group" in given:
            self.group = dist.ProcessGroup.unbox(given["process_group"])
        else:
            self.group = (
                torch._C._distributed_c10d._resolve_process_group(name)
                if isinstance(name, str)
                else name
            )
        self.ranks, self.own = self.group.size(), self.group.rank()

    def __call__(self, *names: str) -> Any:
        return next(self._given[name] for name in names if name in self._given)

    def nbytes(self, *names: str) -> int:
        return sum(t.numel() * t.element_size() for t in _tensors(self(*names)))

    @property
    def sent(self) -> int:
        return self.nbytes(
            "tensors", "input_tensors", "input_tensor", "input_list", "inputs", "input"
        )


def all_reduce(call: _Call) -> int:
    return 2 * (call.ranks - 1) * call.sent // call.ranks


def all_gather(call: _Call) -> int:
    return (call.ranks - 1) * call.sent


def reduce_scatter(call: _Call) -> int:
    return (call.ranks - 1) * call.sent // call.ranks


def all_to_all(call: _Call) -> int:
    x = call("input")
    rows = call("output_split_sizes") or [call("output").shape[0] // call.ranks] * call.ranks
    return (sum(rows) - rows[call.own]) * math.prod(x.shape[1:]) * x.element_size()


def broadcast(call: _Call) -> int:
    return 0 if call("root_rank", "src") == call.own else call.sent


def reduce(call: _Call) -> int:
    return 0 if call("root_rank") == call.own else call.sent


def receive(call: _Call) -> int:
    return call.nbytes("tensors")


_COUNTED: dict[str, Callable[[_Call], int] | None] = {
    "allreduce": all_reduce,
    "allgather": all_gather,
    "reducescatter": reduce_scatter,
    "alltoallsingle": all_to_all,
    "alltoallbase": all_to_all,
    "broadcast": broadcast,
    "reduce": reduce,
    "recv": receive,
    "send": None,
    "wait": None,
    "barrier": None,
}

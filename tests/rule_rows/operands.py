"""Random operands of the rows, and the rows themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from emulate import Row

aten = torch.ops.aten


class Operands:
    """Operands drawn one after the other, the same in every process."""

    def __init__(self) -> None:
        self.numbers = torch.Generator().manual_seed(0)

    def f(self, *shape: int) -> torch.Tensor:
        """Numbers in (0.1, 0.9), where every function is defined and smooth."""
        return torch.rand(shape, generator=self.numbers, dtype=torch.float64) * 0.8 + 0.1

    def n(self, *shape: int) -> torch.Tensor:
        """Normally distributed numbers."""
        return torch.randn(shape, generator=self.numbers, dtype=torch.float64)

    def i(self, high: int, *shape: int) -> torch.Tensor:
        """Integers below ``high``."""
        return torch.randint(high, shape, generator=self.numbers)

    def b(self, *shape: int) -> torch.Tensor:
        """Booleans."""
        return torch.randint(2, shape, generator=self.numbers).bool()


def row(target: Any, *args: Any, **kwargs: Any) -> Row:
    return Row(target, args, kwargs)


def fixed(example: Row, *places: int) -> Row:
    """The row with no gradient of the operands at ``places``."""
    return replace(example, fixed=places)


def overload(name: str) -> Any:
    """The operator of a name such as ``"clamp.Tensor"``."""
    packet, _, which = name.partition(".")
    return getattr(getattr(aten, packet), which or "default")

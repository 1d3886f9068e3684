"""The blocks of random programs, and the model that calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from program_parts import SCOPE
from torch import nn

Batch = dict[str, torch.Tensor]


class Block(nn.Module):
    """One row with its parts; ``given`` are the names under which the model's inputs come in."""

    def __init__(
        self, text: str, parts: Mapping[str, Any], given: Mapping[str, str], residual: bool
    ) -> None:
        super().__init__()
        self.text, self.given, self.residual = text, dict(given), residual
        self.code = compile(text, f"<{text}>", "eval")
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.names = list(parts)

    def forward(self, x: torch.Tensor, inputs: Batch) -> torch.Tensor:
        parts = {name: getattr(self, name) for name in self.names} | {
            name: inputs[key] for name, key in self.given.items()
        }
        y = eval(self.code, {**vars(SCOPE), **sizes(x), **parts, "x": x})
        return x + y if self.residual else y

    def extra_repr(self) -> str:
        own = [
            f"{n}={tuple(p.shape)}{'' if p.requires_grad else ' frozen'}"
            for n, p in self.named_parameters(recurse=False, remove_duplicate=False)
        ]
        own += [f"{n}=buffer{tuple(b.shape)}" for n, b in self.named_buffers(recurse=False)]
        own += [f"{n}=inputs[{key!r}]" for n, key in self.given.items()]
        return ", ".join([f"x + ({self.text})" if self.residual else self.text, *own])


class Program(nn.Module):
    """Blocks one after the other, and the loss; further outputs are ``x`` ``after`` a block by its
    number, and ``outputs`` of the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.loss: Block | None = None
        self.after: dict[str, int] = {}
        self.outputs = nn.ModuleDict()
        self.alone = False

    def forward(self, **inputs: torch.Tensor) -> Any:
        x, found = inputs["x"], {}
        for number, block in enumerate(self.blocks):
            x = block(x, inputs)
            found |= {name: x for name, after in self.after.items() if after == number}
        found |= {name: output(x, inputs) for name, output in self.outputs.items()}
        assert self.loss is not None
        loss = self.loss(x, inputs)
        return loss if self.alone else {"loss": loss, **found}

    def extra_repr(self) -> str:
        return "returns " + (
            "the loss alone"
            if self.alone
            else ", ".join(["loss", *(f"{n} after block {i}" for n, i in self.after.items())])
        )


def sizes(x: torch.Tensor) -> dict[str, int]:
    """What the letters of a row stand for."""
    return {"B": x.shape[0], "L": x.shape[-1]} | ({"S": x.shape[1]} if x.ndim > 1 else {})

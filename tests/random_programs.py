"""Random small models in float64, each drawn from a seed: blocks of ``program_rows`` one after the
other, and a loss.

``program(seed)`` gives the model and two batches; ``print(model)`` shows what it computes, block by
block, with the sizes of its parts.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import program_rows as rows
import torch
from program_blocks import Batch, Block, Program, sizes
from program_losses import COUPLED, OUTPUTS, TARGETED
from program_parts import SCOPE, Row
from torch import nn

MOST = 3000  # elements of any tensor between blocks
KINDS = (("floats", 0.5), ("ids", 0.2), ("images", 0.2), ("vectors", 0.1))


@dataclass
class Drawn:
    """A model that is being drawn: its first batch and what every input is made of."""

    seed: int
    numbers: random.Random
    model: Program = field(default_factory=Program)
    specs: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    batch: Batch = field(default_factory=dict)

    def chance(self, probability: float) -> bool:
        return self.numbers.random() < probability

    def input(self, name: str, kind: str, shape: Sequence[int]) -> str:
        """A new input of the model."""
        self.specs[name] = kind, tuple(shape)
        self.batch[name] = make(kind, shape)
        return name

    def batches(self, count: int) -> Iterator[Batch]:
        yield self.batch
        for _ in range(count - 1):
            yield {name: make(*spec) for name, spec in self.specs.items()}


def make(kind: str, shape: Sequence[int]) -> torch.Tensor:
    """An input's values."""
    if kind == "mask":
        return torch.rand(*shape) > 0.4
    if kind == "weights":
        return (torch.rand(*shape) > 0.4).double()
    if kind.startswith("ids"):
        return torch.randint(int(kind[3:]), tuple(shape))
    return torch.randn(*shape, dtype=torch.float64)


def program(seed: int) -> tuple[Program, list[Batch]]:
    """The model of a seed, in training mode, and two batches."""
    for attempt in range(100):
        with torch.random.fork_rng():
            torch.manual_seed(seed * 100 + attempt)
            drawn = Drawn(seed, random.Random(seed * 100 + attempt))
            if _draw(drawn) and _is_clear(drawn):
                return drawn.model, list(drawn.batches(2))
    raise AssertionError(f"seed {seed}: a hundred programs in turn have no clear result")


def _draw(drawn: Drawn) -> bool:
    """Blocks and a loss; False where no loss fits."""
    numbers = drawn.numbers
    x = _start(drawn)
    mixing = 0.15 if drawn.chance(0.35) else 0.0  # most programs keep their samples apart
    for _ in range(numbers.randint(2, 5)):
        table = _table(drawn, x, mixing)
        x = _extend(drawn, x, table)
    for _ in range(20):
        table = [
            row
            for row in (COUPLED if drawn.chance(0.5 if mixing else 0.1) else TARGETED)
            if str(x.ndim) in row.dims
        ]
        block, loss = _fitted(drawn, numbers.choice(table), x, "loss")
        if (
            block is not None
            and loss is not None
            and loss.ndim == 0
            and loss.requires_grad
            and 1e-3 < abs(float(loss.detach())) < 1e4
        ):
            drawn.model.loss = block
            _finish(drawn, x)
            return True
    return False


def _start(drawn: Drawn) -> torch.Tensor:
    numbers = drawn.numbers
    batch = numbers.choice((4, 4, 8, 8, 8, 8, 12, 16, 6))
    kind = numbers.choices(*zip(*KINDS, strict=True))[0]
    second, last = numbers.choice((4, 4, 4, 8, 2, 6, 5)), numbers.choice((4, 8, 8, 8, 12, 6, 5))
    if kind == "ids":
        drawn.input("x", "ids12", (batch, second))
        first = _block(
            drawn, Row("e(x)", "2", {"e": f"nn.Embedding(12, {last})"}), drawn.batch["x"], "0"
        )
    elif kind == "images":
        x = drawn.batch[
            drawn.input(
                "x", "floats", (batch, numbers.choice((2, 4, 3)), 8, numbers.choice((8, 4)))
            )
        ]
        first = _block(drawn, Row("m(x)", "4", {"m": "nn.Conv2d(S, G, 3, padding=1)"}), x, "0")
    else:
        shape = (batch, last) if kind == "vectors" else (batch, second, last)
        x = drawn.batch[drawn.input("x", "floats", shape)]
        first = _block(drawn, Row("m(x)", "23", {"m": "nn.Linear(L, G)"}), x, "0")
    drawn.model.blocks.append(first)
    return first(drawn.batch["x"], drawn.batch)


def _table(drawn: Drawn, x: torch.Tensor, mixing: float) -> list[Row]:
    by_dims = {2: rows.VECTORS, 3: rows.VECTORS + rows.SEQUENCES, 4: rows.IMAGES}
    if drawn.chance(mixing):
        table = rows.MIXING
    elif drawn.chance(0.06):
        table = rows.CUSTOM
    else:
        table = drawn.numbers.choices(
            (by_dims[x.ndim], rows.ELEMENTWISE, rows.REDUCING), (5, 2, 2)
        )[0]
    return [row for row in table if str(x.ndim) in row.dims]


def _extend(drawn: Drawn, x: torch.Tensor, table: list[Row]) -> torch.Tensor:
    """One more block, of a row that fits; now and then the last one once more, with its
    parameters.
    """
    blocks = drawn.model.blocks
    for _ in range(20):
        again = len(blocks) > 1 and drawn.chance(0.08)
        row = blocks[-1] if again else drawn.numbers.choice(table)
        block, y = _fitted(drawn, row, x, str(len(blocks)))
        if block is not None and y is not None and _goes_on(x, y):
            if not again and y.shape == x.shape and drawn.chance(0.3):
                block.residual, y = True, x + y
            blocks.append(block)
            return y
    return x


def _goes_on(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether another block may follow."""
    shaped = (
        2 <= y.ndim <= 4 and y.shape[0] == x.shape[0] and min(y.shape) > 1 and y.numel() <= MOST
    )
    return (
        shaped
        and y.requires_grad
        and y.dtype == torch.float64
        and 1e-2 < float(y.detach().std()) < 50
    )


def _block(drawn: Drawn, row: Row, x: torch.Tensor, name: str) -> Block:
    """A row with parts for ``x``; inputs are called after the block."""
    numbers, letters = drawn.numbers, sizes(x) | {"G": drawn.numbers.choice((4, 8, 8, 6))}
    words = {
        "X": " ".join(map(str, x.shape)),
        "ones": " ".join(["1"] * (x.ndim - 1)),
        "lead": " ".join(map(str, x.shape[:-1])),
    }
    text = row.text.replace("{d}", str(numbers.randrange(1, max(2, x.ndim))))
    parts: dict[str, Any] = {}
    given: dict[str, str] = {}
    for part, spec in row.parts.items():
        if "(" in spec:
            parts[part] = eval(spec, {**vars(SCOPE), **letters}).double()
            continue
        spec = (
            spec.replace("{ones}", words["ones"])
            .replace("{lead}", words["lead"])
            .replace("X", words["X"])
        )
        kind, *shape = (
            spec.split() if spec[:3] in ("buf", "flo", "mas", "wei", "ids") else ["", *spec.split()]
        )
        if kind == "ids":
            kind, shape = f"ids{letters.get(shape[0], shape[0])}", shape[1:]
        numbered = [int(letters.get(s, s)) for s in shape]
        if kind in ("", "buffer"):
            value = 0.5 * torch.randn(numbered, dtype=torch.float64)
            parts[part] = nn.Parameter(value) if kind == "" else value
        else:
            given[part] = drawn.input(f"{part}_{name}", kind, numbered)
    return Block(text, parts, given, False)


def _fitted(
    drawn: Drawn, row: Row | Block, x: torch.Tensor, name: str
) -> tuple[Block | None, torch.Tensor | None]:
    """A row's block, and what a copy of it makes of ``x``; None where it does not fit."""
    try:
        block = row if isinstance(row, Block) else _block(drawn, row, x, name)
        y = copy.deepcopy(block)(x.detach().requires_grad_(), drawn.batch)
    except (RuntimeError, IndexError, ValueError, AssertionError, ZeroDivisionError, TypeError):
        return None, None
    return block, y if isinstance(y, torch.Tensor) and bool(y.isfinite().all()) else None


def _finish(drawn: Drawn, x: torch.Tensor) -> None:
    """Outputs beside the loss, frozen and shared parameters; inputs that nothing takes go."""
    model, numbers = drawn.model, drawn.numbers
    used = {key for block in (*model.blocks, model.loss) for key in block.given.values()} | {"x"}
    for held in (drawn.batch, drawn.specs):
        for name in set(held) - used:
            del held[name]
    model.alone = drawn.chance(0.3)
    if drawn.chance(0.6):
        model.after = {"hidden": numbers.randrange(len(model.blocks))}
    if drawn.chance(0.25):
        row = numbers.choice(OUTPUTS)
        model.outputs["other"] = _block(drawn, row, x, "other")
    if drawn.chance(0.15):
        for block in model.blocks[: numbers.randint(1, len(model.blocks))]:
            block.requires_grad_(False)
    named = [
        (block, name, p)
        for block in model.blocks
        for name, p in block.named_parameters(recurse=False)
    ]
    if len(named) > 1 and drawn.chance(0.3):
        block, name, parameter = numbers.choice(named)
        alike = [(b, n) for b, n, p in named if p is not parameter and p.shape == parameter.shape]
        if alike:
            setattr(*numbers.choice(alike), parameter)


def _is_clear(drawn: Drawn) -> bool:
    """Whether rounding does not decide on the result: parameters and inputs that are another by
    1e-13 give the same to 1e-10.
    """
    parameters = [p for p in drawn.model.parameters() if p.requires_grad]
    if not parameters:
        return False
    try:
        exact, near = (
            _results(copy.deepcopy(drawn.model), drawn.batch, share) for share in (0.0, 1e-13)
        )
    except RuntimeError:  # what is changed in place, autograd may have kept
        return False
    scale = max(float(g.abs().max()) for g in exact[1:])
    if not (1e-6 < scale < 1e4):
        return False
    close = [
        float((a - b).abs().max()) <= 1e-10 * max(float(a.abs().max()), 1e-3 * scale)
        for a, b in zip(exact, near, strict=True)
    ]
    return all(close)


def _results(model: Program, batch: Batch, share: float) -> list[torch.Tensor]:
    def moved(x: torch.Tensor) -> torch.Tensor:
        return x * (1 + share * torch.randn_like(x)) if x.is_floating_point() else x

    with torch.no_grad():
        for p in model.parameters():
            p.copy_(moved(p))
    output = model(**{name: moved(x) if name == "x" else x for name, x in batch.items()})
    loss = output if isinstance(output, torch.Tensor) else output["loss"]
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

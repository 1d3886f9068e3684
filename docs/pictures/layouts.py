"""Pictures of docs/layouts.md."""

from __future__ import annotations

from picture import NODE, PENDING, PLAIN, RANK, Picture, picture


def _tensor(p: Picture, x: float, y: float, kind: str, rank: int, gradient: bool) -> None:
    """A tensor of type ``kind`` on one of two ranks, or its gradient."""
    w, h, fill = 56, 44, RANK[rank]
    if kind.startswith("S"):
        p.box(x, y, w, h, "", PLAIN, dashed=True)
        rows = kind == "S(0)"
        p.box(
            x + (0 if rows else rank * w / 2),
            y + (rank * h / 2 if rows else 0),
            w if rows else w / 2,
            h / 2 if rows else h,
            "",
            fill,
        )
    elif kind == "P":
        p.box(x, y, w, h, f"part {'ab'[rank]}", PENDING, 12)
    else:
        p.box(x, y, w, h, "a + b" if gradient else "whole", NODE, 12)


@picture
def types() -> Picture:
    p = Picture(760, 270, "The four types on two ranks, and the types of their gradients")
    for i, (kind, dual) in enumerate(
        (("I", "I"), ("R", "P"), ("P", "R"), ("S(0)", "S(0)"), ("S(1)", "S(1)"))
    ):
        x = 110 + i * 130
        p.text(x + 58, 24, kind, size=16, bold=True)
        p.text(x + 58, 142, f"gradient: {dual}", size=13, bold=True)
        for rank in (0, 1):
            _tensor(p, x + rank * 60, 46, kind, rank, False)
            _tensor(p, x + rank * 60, 164, dual, rank, True)
            p.note(x + 28 + rank * 60, 102, f"rank {rank}")
            p.note(x + 28 + rank * 60, 220, f"rank {rank}")
    p.text(16, 68, "value", "start", 13, bold=True)
    p.text(16, 186, "gradient", "start", 13, bold=True)
    p.note(380, 250, "A red box holds one part of a sum; the sum over the ranks is the tensor.")
    return p


@picture
def two_axes() -> Picture:
    p = Picture(760, 220, "A matrix on a mesh of data 2 × tensor 2")
    kinds = [
        ("(S0, S1)", "rows over data, columns over tensor"),
        ("(S0, S0)", "rows over both, data is major"),
        ("(S0, I)", "rows over data, alike along tensor"),
    ]
    for i, (layout, words) in enumerate(kinds):
        x, w, h = 40 + i * 250, 150, 100
        p.text(x + w / 2, 24, layout, size=15, bold=True)
        for rank in range(4):
            data, tensor = divmod(rank, 2)
            if layout == "(S0, S1)":
                p.box(
                    x + tensor * w / 2,
                    46 + data * h / 2,
                    w / 2,
                    h / 2,
                    f"rank {rank}",
                    RANK[rank],
                    12,
                )
            elif layout == "(S0, S0)":
                p.box(x, 46 + rank * h / 4, w, h / 4, f"rank {rank}", RANK[rank], 12)
            elif tensor == 0:
                p.box(
                    x, 46 + data * h / 2, w, h / 2, f"ranks {rank} and {rank + 1}", RANK[rank], 12
                )
        p.note(x + w / 2, 170, words)
    p.note(380, 200, "rank = 2 × (place along data) + (place along tensor)")
    return p


@picture
def orders() -> Picture:
    p = Picture(760, 230, "Other ways to cut a dim of 12 elements between two ranks")
    rows = [
        ("S0", [0] * 6 + [1] * 6, "equal chunks, in order"),
        ("Z0", [0] * 3 + [1] * 6 + [0] * 3, "zigzag: first and last quarter, for causal attention"),
        ("S0/3", ([0] * 2 + [1] * 2) * 3, "each of three equal parts is cut: query, key, value"),
    ]
    for i, (name, ranks, words) in enumerate(rows):
        y = 24 + i * 52
        p.text(20, y + 15, name, "start", 15, bold=True)
        for k, rank in enumerate(ranks):
            p.box(80 + k * 26, y, 26, 30, str(rank), RANK[rank], 12)
        p.text(410, y + 15, words, "start", 12)
    p.text(20, 195, "s0", "start", 15, bold=True)
    p.text(
        80,
        195,
        "cuts within the chunks of all other axes, wherever its own axis stands",
        "start",
        12,
    )
    return p

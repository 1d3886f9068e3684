"""Draws the pictures of the documentation: ``python docs/pictures.py`` writes docs/images/*.svg.

Each picture has a light background of its own, so that its text is readable on light and on dark pages.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from autopar.cost_model.schedule import Action, actions, awaited

RANK = ("#a6cee3", "#fdbf6f", "#b2df8a", "#cab2d6", "#8fd0c8", "#f4a8b4", "#d9c79b", "#b8bfc8")
PLAIN, NODE, PENDING, WIRE, INK, FAINT = "#ffffff", "#eef1f6", "#f7d9d9", "#5c677d", "#1d2433", "#56607a"
PICTURES: dict[str, Callable[[], Picture]] = {}


class Picture:
    """An SVG picture, made of boxes, texts and arrows. Sizes are in pixels; y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{WIRE}"/></marker></defs>',
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#fbfcfe" stroke="#d5dae3"/>',
        ]

    def box(
        self, x: float, y: float, w: float, h: float, text: str = "", fill: str = NODE, size: int = 13, dashed: bool = False
    ) -> None:
        """A rectangle with ``text`` in its middle; line breaks in the text are kept."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" fill="{fill}" stroke="{WIRE}"{dashes}/>'
        )
        lines = text.split("\n") if text else []
        for i, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + (i - (len(lines) - 1) / 2) * size * 1.25, line, size=size)

    def text(self, x: float, y: float, text: str, anchor: str = "middle", size: int = 13, bold: bool = False, fill: str = INK) -> None:
        """One line of text, centred on ``y``."""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y + size * 0.35:.4g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"{weight}>{escape(text)}</text>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, text: str = "", bend: float = 0, wide: float = 1.4, both: bool = False) -> None:
        """An arrow, curved by ``bend`` pixels, with ``text`` beside its middle."""
        across = (x1 + x2) / 2 + (bend if x1 == x2 else 0), (y1 + y2) / 2 + (bend if x1 != x2 else 0)
        start = ' marker-start="url(#tip)"' if both else ""
        self.parts.append(
            f'<path d="M{x1:g} {y1:g}Q{across[0]:g} {across[1]:g} {x2:g} {y2:g}" fill="none" stroke="{WIRE}" '
            f'stroke-width="{wide:g}" marker-end="url(#tip)"{start}/>'
        )
        if text:
            self.text((x1 + x2) / 2 + (bend if x1 == x2 else 0) / 2, (y1 + y2) / 2 + bend / 2 - 9, text, size=11, fill=FAINT)

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>\n"])


def picture(function: Callable[[], Picture]) -> Callable[[], Picture]:
    """Adds a function to those whose pictures are written, under the function's name."""
    PICTURES[function.__name__.replace("_", "-")] = function
    return function


# How it works


@picture
def steps() -> Picture:
    p = Picture(760, 130, "From a model to a training step, in six steps")
    names = ["nn.Module", "captured\ngraph", "strategies", "plan", "program\nof a rank", "training\nstep"]
    verbs = ["capture", "rules", "search", "lowering", "runtime"]
    for i, name in enumerate(names):
        p.box(20 + i * 124, 40, 84, 50, name, fill=RANK[0] if i in (0, 5) else NODE)
        if i:
            p.arrow(20 + i * 124 - 38, 65, 20 + i * 124 - 3, 65)
            p.text(20 + i * 124 - 20, 110, verbs[i - 1], size=12, fill=FAINT)
    return p


@picture
def captured() -> Picture:
    p = Picture(760, 130, "The captured graph of the small model")
    names = ["x", *["up", "relu", "down", "add"] * 2, "sub y", "pow 2", "mean"]
    for i, name in enumerate(names):
        p.box(16 + i * 61, 56, 50, 34, name, PLAIN if name == "x" else RANK[(i - 1) // 4] if i < 9 else NODE, 11)
        if i:
            p.arrow(16 + i * 61 - 11, 73, 16 + i * 61 - 1, 73)
    for start in (0, 4):  # the residual stream passes each block
        p.arrow(41 + start * 61, 54, 41 + (start + 4) * 61, 54, bend=-60)
    for x, name in ((193, "blocks.0"), (437, "blocks.1"), (651, "loss")):
        p.text(x, 110, name, size=12, fill=FAINT)
    return p


def _matrix(p: Picture, x: float, y: float, w: float, h: float, name: str, split: str, dims: str) -> None:
    """A matrix, split between two ranks by rows ("r"), by columns ("c"), not at all (""), or a pending sum ("p")."""
    if split == "r":
        p.box(x, y, w, h / 2, "", RANK[0])
        p.box(x, y + h / 2, w, h / 2, "", RANK[1])
    elif split == "c":
        p.box(x, y, w / 2, h, "", RANK[0])
        p.box(x + w / 2, y, w / 2, h, "", RANK[1])
    else:
        p.box(x, y, w, h, "+" if split == "p" else "", PENDING if split == "p" else PLAIN, dashed=split == "p")
    p.text(x + w / 2, y - 10, f"{name} [{dims}]", size=11)


@picture
def rule() -> Picture:
    p = Picture(760, 290, "A linear layer and the three factors that may be split")
    rows = [
        ("split m", "data-parallel", "r", "", "r", "x: S(0), weight: R, result: S(0)"),
        ("split n", "column-parallel", "", "r", "c", "x: R, weight: S(0), result: S(1)"),
        ("split k", "row-parallel", "c", "c", "p", "x: S(1), weight: S(1), result: P"),
    ]
    for i, (factor, word, x, w, y, types) in enumerate(rows):
        top = 36 + i * 84
        p.text(20, top + 18, factor, "start", 14, bold=True)
        p.text(20, top + 38, word, "start", 12, fill=FAINT)
        _matrix(p, 150, top, 60, 44, "x", x, "m, k")
        p.text(234, top + 22, "×")
        _matrix(p, 258, top, 60, 56, "weight", w, "n, k")
        p.text(342, top + 22, "→")
        _matrix(p, 366, top, 70, 44, "result", y, "m, n")
        p.text(470, top + 22, types, "start", 13)
    for rank in (0, 1):
        p.box(150 + rank * 90, 268, 14, 14, "", RANK[rank])
        p.text(170 + rank * 90, 275, f"rank {rank}", "start", 11)
    p.text(330, 275, "white: whole on both ranks; red: each rank has a part of the sum", "start", 11, fill=FAINT)
    return p


@picture
def strategies() -> Picture:
    p = Picture(760, 250, "One strategy for each node, a conversion on each edge, and the cheapest way through")
    nodes = {"up": ["split m", "split n", "split k", "unsplit"], "relu": ["split m", "split n", "", "unsplit"], "down": ["split m", "split n", "split k", "unsplit"]}
    for i, (node, options) in enumerate(nodes.items()):
        p.text(150 + i * 220, 24, node if node == "relu" else f"linear {node}", bold=True)
        for k, option in enumerate(options):
            if option:
                chosen = (i, k) in ((0, 1), (1, 1), (2, 2))
                p.box(95 + i * 220, 44 + k * 46, 110, 30, option, RANK[2] if chosen else NODE)
    edges = [(0, a, b) for a in range(4) for b in (0, 1, 3)] + [(1, a, b) for a in (0, 1, 3) for b in range(4)]
    for i, a, b in edges:
        best = (i, a, b) in ((0, 1, 1), (1, 1, 2))
        p.arrow(207 + i * 220, 59 + a * 46, 312 + i * 220, 59 + b * 46, wide=3 if best else 0.5)
    p.text(380, 236, "box: seconds and bytes of a strategy; line: seconds of the conversion, 0 where the layouts agree", size=12, fill=FAINT)
    return p


@picture
def plan() -> Picture:
    p = Picture(760, 250, "The plan: two stages, each on two ranks, and the part of each weight that a rank stores")
    for stage in (0, 1):
        x = 30 + stage * 370
        p.box(x, 34, 330, 180, "", PLAIN)
        p.text(x + 165, 18, f"stage {stage}: blocks.{stage}", bold=True)
        for place in (0, 1):
            rank = 2 * stage + place
            y = 46 + place * 84
            p.box(x + 12, y, 306, 74, "", "#f6f8fc")
            p.text(x + 50, y + 37, f"rank {rank}", bold=True)
            for i, (name, rows, dims) in enumerate((("up.weight S(0)", True, "512 × 256"), ("down.weight S(1)", False, "256 × 512"))):
                left = x + 98 + i * 116
                for half in (0, 1):
                    fill = RANK[rank] if half == place else PLAIN
                    where = (left, y + 8 + half * 16, 36, 16) if rows else (left + half * 18, y + 8, 18, 32)
                    p.box(*where, "", fill)
                p.text(left + 30, y + 54, name, size=11)
                p.text(left + 70, y + 24, dims, size=11, fill=FAINT)
        p.text(x + 165, 230, "mesh axis tensor (2)", size=12, fill=FAINT)
    p.arrow(362, 124, 398, 124)
    return p


@picture
def conversions() -> Picture:
    p = Picture(760, 190, "The conversions of one block: free in one direction, an all-reduce in the other")
    for i, (name, kind) in enumerate((("x", "I"), ("", "R"), ("linear up", "S(1)"), ("relu", "S(1)"), ("linear down", "P"), ("", "I"))):
        x = 24 + i * 124
        fill = {"S(1)": RANK[2], "P": PENDING}.get(kind, PLAIN)
        p.box(x, 70, 92, 44, f"{name}\n{kind}" if name else kind, fill)
        if i:
            p.arrow(x - 31, 84, x - 1, 84)
            p.arrow(x - 1, 102, x - 31, 102)
    p.text(24, 40, "forward →", "start", 12, bold=True)
    p.text(24, 150, "← backward", "start", 12, bold=True)
    p.text(132, 54, "I → R: nothing", size=12)
    p.text(132, 134, "P → I: all-reduce", size=12, bold=True)
    p.text(628, 54, "P → I: all-reduce", size=12, bold=True)
    p.text(628, 134, "I → R: nothing", size=12)
    p.text(380, 172, "The backward of a conversion is the conversion between the duals, in the other direction.", size=12, fill=FAINT)
    return p


@picture
def program() -> Picture:
    p = Picture(760, 260, "What each of the four ranks runs for one microbatch")
    for rank in range(4):
        stage, place = divmod(rank, 2)
        x, y = 24 + stage * 372, 40 + place * 110
        ops = ["up", "relu", "down", "reduce"] if stage == 0 else ["add", "up", "relu", "down", "reduce", "add", "loss"]
        p.text(x, y - 12, f"rank {rank}", "start", 13, bold=True)
        w = 330 / len(ops)
        for i, op in enumerate(ops):
            p.box(x + i * w, y, w - 8, 40, op, PENDING if op == "reduce" else RANK[rank], 11)
            if i:
                p.arrow(x + i * w - 8, y + 20, x + i * w, y + 20)
        if stage == 0:
            p.arrow(x + 322, y + 20, x + 370, y + 20, "send")
        if place:
            at = x + (ops.index("reduce") + 0.5) * w - 4
            p.arrow(at, y - 2, at, y - 68, both=True, wide=2.5)
            p.text(at - 6, y - 34, "all-reduce", "end", 11, fill=FAINT)
    p.text(380, 236, "The backward runs the same boxes from right to left, with the gradients' collectives.", size=12, fill=FAINT)
    return p


def timeline(schedule: str, pipeline: int, microbatches: int, forward: int = 1, backward: int = 2) -> list[list[tuple[Action, int]]]:
    """Each rank's actions with their start, where a forward takes ``forward`` and a backward ``backward``."""
    orders = actions(schedule, pipeline, 1, microbatches)
    ends: dict[Action, int] = {}
    found: list[list[tuple[Action, int]]] = [[] for _ in orders]
    free = [0] * pipeline
    while any(len(done) < len(order) for done, order in zip(found, orders, strict=True)):
        for rank, order in enumerate(orders):
            if len(found[rank]) < len(order):
                action = order[len(found[rank])]
                before = awaited(action, pipeline)
                if before is None or before in ends:
                    start = max(free[rank], ends[before] if before else 0)
                    free[rank] = ends[action] = start + (forward if action.kind == "F" else backward)
                    found[rank].append((action, start))
    return found


@picture
def one_f_one_b() -> Picture:
    p = Picture(760, 170, "1F1B: two stages and four microbatches")
    unit = 42
    for rank, done in enumerate(timeline("1f1b", 2, 4)):
        y = 34 + rank * 52
        p.text(16, y + 18, f"stage {rank}", "start", 13, bold=True)
        p.box(84, y, 15 * unit, 36, "", "#f2f3f6", dashed=True)
        for action, start in done:
            width = unit if action.kind == "F" else 2 * unit
            p.box(84 + start * unit, y, width, 36, f"{action.kind}{action.microbatch}", RANK[0] if action.kind == "F" else RANK[1])
    p.text(84, 150, "F: forward, B: backward, with the microbatch's number; dashed: bubble", "start", 12, fill=FAINT)
    return p


# Layouts


def _tensor(p: Picture, x: float, y: float, kind: str, rank: int, gradient: bool) -> None:
    """A tensor of type ``kind`` on one of two ranks, or its gradient."""
    w, h, fill = 56, 44, RANK[rank]
    if kind.startswith("S"):
        p.box(x, y, w, h, "", PLAIN, dashed=True)
        rows = kind == "S(0)"
        p.box(x + (0 if rows else rank * w / 2), y + (rank * h / 2 if rows else 0), w if rows else w / 2, h / 2 if rows else h, "", fill)
    elif kind == "P":
        p.box(x, y, w, h, f"part {'ab'[rank]}", PENDING, 12)
    else:
        p.box(x, y, w, h, "a + b" if gradient else "whole", NODE, 12)


@picture
def types() -> Picture:
    p = Picture(760, 270, "The four types on two ranks, and the types of their gradients")
    for i, (kind, dual) in enumerate((("I", "I"), ("R", "P"), ("P", "R"), ("S(0)", "S(0)"), ("S(1)", "S(1)"))):
        x = 110 + i * 130
        p.text(x + 58, 24, kind, size=16, bold=True)
        p.text(x + 58, 142, f"gradient: {dual}", size=13, bold=True)
        for rank in (0, 1):
            _tensor(p, x + rank * 60, 46, kind, rank, False)
            _tensor(p, x + rank * 60, 164, dual, rank, True)
            p.text(x + 28 + rank * 60, 102, f"rank {rank}", size=11, fill=FAINT)
            p.text(x + 28 + rank * 60, 220, f"rank {rank}", size=11, fill=FAINT)
    p.text(16, 68, "value", "start", 13, bold=True)
    p.text(16, 186, "gradient", "start", 13, bold=True)
    p.text(380, 250, "A red box holds one part of a sum; the sum over the ranks is the tensor.", size=12, fill=FAINT)
    return p


@picture
def two_axes() -> Picture:
    p = Picture(760, 220, "A matrix on a mesh of data 2 × tensor 2")
    kinds = [("(S0, S1)", "rows over data, columns over tensor"), ("(S0, S0)", "rows over both, data is major"), ("(S0, I)", "rows over data, alike along tensor")]
    for i, (layout, words) in enumerate(kinds):
        x, w, h = 40 + i * 250, 150, 100
        p.text(x + w / 2, 24, layout, size=15, bold=True)
        for rank in range(4):
            data, tensor = divmod(rank, 2)
            if layout == "(S0, S1)":
                p.box(x + tensor * w / 2, 46 + data * h / 2, w / 2, h / 2, f"rank {rank}", RANK[rank], 12)
            elif layout == "(S0, S0)":
                p.box(x, 46 + rank * h / 4, w, h / 4, f"rank {rank}", RANK[rank], 12)
            elif tensor == 0:
                p.box(x, 46 + data * h / 2, w, h / 2, f"ranks {rank} and {rank + 1}", RANK[rank], 12)
        p.text(x + w / 2, 170, words, size=12, fill=FAINT)
    p.text(380, 200, "rank = 2 × (place along data) + (place along tensor)", size=12, fill=FAINT)
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
    p.text(80, 195, "cuts what all other axes leave of the dim: their chunks are the coarse ones, wherever the axis stands", "start", 12)
    return p


# Search, report, runtime, modes


@picture
def search() -> Picture:
    p = Picture(760, 250, "The search: an enumeration outside, an integer linear program inside, then a full count")
    p.box(16, 30, 190, 180, "parallel configurations\n\npipeline size\nmesh\nmicrobatches\nschedule, chunks\nmode", PLAIN)
    p.arrow(208, 120, 262, 120, "bounds")
    p.box(264, 30, 190, 180, "integer linear program\n\nstrategy of each node\nconversion on each edge\nkeep or recompute\nat a price of memory", PLAIN)
    p.arrow(456, 120, 510, 120, "solutions")
    p.box(512, 30, 106, 180, "candidates\n\nstage cuts\na solution\nfor each unit", PLAIN)
    p.arrow(620, 120, 654, 120)
    p.box(656, 30, 88, 180, "plan\n\nevery byte\ncounted\nbuckets\ncounted", RANK[2])
    p.arrow(700, 212, 566, 212, bend=36)
    p.text(633, 240, "too large: again, with less room", size=11, fill=FAINT)
    return p


@picture
def memory() -> Picture:
    p = Picture(760, 290, "The memory of a device during a step")
    p.arrow(60, 250, 740, 250)
    p.arrow(60, 250, 60, 20)
    p.text(66, 22, "bytes", "start", 12, fill=FAINT)
    p.text(736, 266, "time", "end", 12, fill=FAINT)
    bands = [
        ("parameters and optimizer state", RANK[0], [(60, 250), (60, 200), (730, 200), (730, 250)]),
        ("gathered parameters", RANK[3], [(80, 200), (80, 178), (590, 178), (590, 200)]),
        ("activations", RANK[2], [(100, 178), (330, 70), (560, 178)]),
        ("gradients", RANK[1], [(330, 70), (560, 140), (700, 140), (700, 200), (590, 200), (590, 178), (560, 178)]),
        ("transient", PENDING, [(325, 72), (325, 46), (345, 46), (345, 76), (330, 70)]),
    ]
    for _, fill, points in bands:
        p.parts.append(f'<polygon points="{" ".join(f"{x},{y}" for x, y in points)}" fill="{fill}" stroke="{WIRE}"/>')
    p.text(395, 226, bands[0][0])
    p.text(200, 189, bands[1][0], size=12)
    p.text(320, 150, bands[2][0])
    p.text(615, 156, bands[3][0])
    p.text(352, 52, "transient: the largest operator", "start", 12)
    for x, name in ((215, "forward"), (445, "backward"), (640, "optimizer")):
        p.text(x, 276, name, size=12, bold=True)
    return p


@picture
def step() -> Picture:
    p = Picture(760, 200, "One step of a rank with ZeRO and two microbatches")
    lanes: Sequence[tuple[str, int, Iterable[tuple[str, int, int, str]]]] = [
        ("compute", 40, [("F0", 150, 70, RANK[0]), ("B0", 222, 110, RANK[1]), ("F1", 334, 70, RANK[0]), ("B1", 406, 110, RANK[1]), ("optimizer", 590, 80, RANK[3])]),
        ("links", 100, [("gather", 96, 52, RANK[2]), ("bucket 2", 446, 44, PENDING), ("bucket 1", 492, 44, PENDING), ("bucket 0", 538, 48, PENDING)]),
    ]
    for name, y, spans in lanes:
        p.text(16, y + 18, name, "start", 13, bold=True)
        for text, x, width, fill in spans:
            p.box(x, y, width, 36, text, fill, 11)
    p.text(420, 160, "gradients are synchronised once a step: a bucket starts when the last backward has made all its gradients", size=12, fill=FAINT)
    p.text(420, 182, "bucket 0 has nothing left to hide behind: its time is in the step", size=12, fill=FAINT)
    return p


@picture
def modes() -> Picture:
    p = Picture(760, 230, "How a weight and the activations lie in each mode")
    p.text(16, 76, "weight", "start", 13, bold=True)
    p.text(16, 166, "activations", "start", 13, bold=True)
    for i, (name, weight, activations) in enumerate(
        (("1d, 4 ranks", (1, 4), (1, 1)), ("2d, 4 ranks", (2, 2), (2, 2)), ("2.5d, 8 ranks", (2, 2), (4, 2)), ("3d, 8 ranks", (4, 2), (4, 2)), ("sequence, 4 ranks", (1, 1), (4, 1)))
    ):
        x = 100 + i * 132
        p.text(x + 50, 22, name, bold=True, size=12)
        for (rows, columns), y in ((weight, 42), (activations, 130)):
            for r in range(rows):
                for c in range(columns):
                    p.box(x + c * 100 / columns, y + r * 70 / rows, 100 / columns, 70 / rows, "", RANK[r * columns + c] if rows * columns > 1 else NODE)
    p.text(380, 216, "activations: rows are samples and the sequence, columns are features; one colour is one rank's chunk, grey is whole on each rank", size=11, fill=FAINT)
    return p


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images")

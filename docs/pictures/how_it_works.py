"""Pictures of docs/how-it-works.md: one for each step."""

from __future__ import annotations

from picture import NODE, PENDING, PLAIN, RANK, Picture, picture

from autopar.cost_model.schedule import actions


@picture
def steps() -> Picture:
    p = Picture(760, 130, "From a model to a training step, in six steps")
    names = [
        "nn.Module",
        "captured\ngraph",
        "strategies",
        "plan",
        "program\nof a rank",
        "training\nstep",
    ]
    verbs = ["capture", "rules", "search", "lowering", "runtime"]
    for i, name in enumerate(names):
        p.box(20 + i * 124, 40, 84, 50, name, fill=RANK[0] if i in (0, 5) else NODE)
        if i:
            p.arrow(20 + i * 124 - 38, 65, 20 + i * 124 - 3, 65)
            p.note(20 + i * 124 - 20, 110, verbs[i - 1])
    return p


@picture
def captured() -> Picture:
    p = Picture(760, 130, "The captured graph of the small model")
    names = ["x", *["up", "relu", "down", "add"] * 2, "sub y", "pow 2", "mean"]
    for i, name in enumerate(names):
        p.box(
            16 + i * 61,
            56,
            50,
            34,
            name,
            PLAIN if name == "x" else RANK[(i - 1) // 4] if i < 9 else NODE,
            11,
        )
        if i:
            p.arrow(16 + i * 61 - 11, 73, 16 + i * 61 - 1, 73)
    for start in (0, 4):  # the residual stream passes each block
        p.arrow(41 + start * 61, 54, 41 + (start + 4) * 61, 54, bend=-60)
    for x, name in ((193, "blocks.0"), (437, "blocks.1"), (651, "loss")):
        p.note(x, 110, name)
    return p


def _matrix(
    p: Picture, x: float, y: float, w: float, h: float, name: str, split: str, dims: str
) -> None:
    """A matrix of two ranks: split by rows ("r") or columns ("c"), whole (""), or P ("p")."""
    if split == "r":
        p.box(x, y, w, h / 2, "", RANK[0])
        p.box(x, y + h / 2, w, h / 2, "", RANK[1])
    elif split == "c":
        p.box(x, y, w / 2, h, "", RANK[0])
        p.box(x + w / 2, y, w / 2, h, "", RANK[1])
    else:
        p.box(
            x,
            y,
            w,
            h,
            "+" if split == "p" else "",
            PENDING if split == "p" else PLAIN,
            dashed=split == "p",
        )
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
        p.note(20, top + 38, word, "start")
        _matrix(p, 150, top, 60, 44, "x", x, "m, k")
        p.text(234, top + 22, "×")
        _matrix(p, 258, top, 60, 56, "weight", w, "n, k")
        p.text(342, top + 22, "→")
        _matrix(p, 366, top, 70, 44, "result", y, "m, n")
        p.text(470, top + 22, types, "start", 13)
    for rank in (0, 1):
        p.box(150 + rank * 90, 268, 14, 14, "", RANK[rank])
        p.text(170 + rank * 90, 275, f"rank {rank}", "start", 11)
    p.note(330, 275, "white: whole on both ranks; red: each rank has a part of the sum", "start")
    return p


@picture
def strategies() -> Picture:
    p = Picture(
        760,
        250,
        "One strategy for each node, a conversion on each edge, and the cheapest way through",
    )
    nodes = {
        "up": ["split m", "split n", "split k", "unsplit"],
        "relu": ["split m", "split n", "", "unsplit"],
        "down": ["split m", "split n", "split k", "unsplit"],
    }
    for i, (node, options) in enumerate(nodes.items()):
        p.text(150 + i * 220, 24, node if node == "relu" else f"linear {node}", bold=True)
        for k, option in enumerate(options):
            if option:
                chosen = (i, k) in ((0, 1), (1, 1), (2, 2))
                p.box(95 + i * 220, 44 + k * 46, 110, 30, option, RANK[2] if chosen else NODE)
    edges = [(0, a, b) for a in range(4) for b in (0, 1, 3)] + [
        (1, a, b) for a in (0, 1, 3) for b in range(4)
    ]
    for i, a, b in edges:
        best = (i, a, b) in ((0, 1, 1), (1, 1, 2))
        p.arrow(207 + i * 220, 59 + a * 46, 312 + i * 220, 59 + b * 46, wide=3 if best else 0.5)
    p.note(
        380,
        236,
        "box: seconds and bytes of a strategy; line: seconds of a conversion, 0 for equal layouts",
    )
    return p


@picture
def plan() -> Picture:
    p = Picture(
        760,
        250,
        "The plan: two stages, each on two ranks, and the part of each weight that a rank stores",
    )
    for stage in (0, 1):
        x = 30 + stage * 370
        p.box(x, 34, 330, 180, "", PLAIN)
        p.text(x + 165, 18, f"stage {stage}: blocks.{stage}", bold=True)
        for place in (0, 1):
            rank = 2 * stage + place
            y = 46 + place * 84
            p.box(x + 12, y, 306, 74, "", "#f6f8fc")
            p.text(x + 50, y + 37, f"rank {rank}", bold=True)
            for i, (name, rows, dims) in enumerate(
                (("up.weight S(0)", True, "512 × 256"), ("down.weight S(1)", False, "256 × 512"))
            ):
                left = x + 98 + i * 116
                for half in (0, 1):
                    fill = RANK[rank] if half == place else PLAIN
                    where = (
                        (left, y + 8 + half * 16, 36, 16)
                        if rows
                        else (left + half * 18, y + 8, 18, 32)
                    )
                    p.box(*where, "", fill)
                p.text(left + 30, y + 54, name, size=11)
                p.note(left + 70, y + 24, dims)
        p.note(x + 165, 230, "mesh axis tensor (2)")
    p.arrow(362, 124, 398, 124)
    return p


@picture
def conversions() -> Picture:
    p = Picture(
        760, 190, "The conversions of one block: free in one direction, an all-reduce in the other"
    )
    for i, (name, kind) in enumerate(
        (
            ("x", "I"),
            ("", "R"),
            ("linear up", "S(1)"),
            ("relu", "S(1)"),
            ("linear down", "P"),
            ("", "I"),
        )
    ):
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
    p.note(
        380,
        172,
        "The backward of a conversion is the conversion between the duals, in the other direction.",
    )
    return p


@picture
def program() -> Picture:
    p = Picture(760, 260, "What each of the four ranks runs for one microbatch")
    for rank in range(4):
        stage, place = divmod(rank, 2)
        x, y = 24 + stage * 372, 40 + place * 110
        ops = (
            ["up", "relu", "down", "reduce"]
            if stage == 0
            else ["add", "up", "relu", "down", "reduce", "add", "loss"]
        )
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
            p.note(at - 6, y - 34, "all-reduce", "end")
    p.note(
        380,
        236,
        "The backward runs the same boxes from right to left, with the gradients' collectives.",
    )
    return p


def timeline(stages: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """1F1B by stage: kind, microbatch and start of each action; a backward takes two units."""
    orders = actions("1f1b", stages, 1, microbatches)
    ends: dict[tuple[str, int, int], int] = {}
    found: list[list[tuple[str, int, int]]] = [[] for _ in orders]
    free = [0] * stages
    while any(len(done) < len(order) for done, order in zip(found, orders, strict=True)):
        for stage, order in enumerate(orders):
            if len(found[stage]) < len(order):
                kind, _, microbatch = order[len(found[stage])]
                sender = stage - 1 if kind == "F" else stage + 1
                if sender in range(stages) and (kind, sender, microbatch) not in ends:
                    continue
                start = max(free[stage], ends.get((kind, sender, microbatch), 0))
                free[stage] = ends[kind, stage, microbatch] = start + (1 if kind == "F" else 2)
                found[stage].append((kind, microbatch, start))
    return found


@picture
def one_f_one_b() -> Picture:
    p = Picture(760, 170, "1F1B: two stages and four microbatches")
    unit = 42
    for stage, done in enumerate(timeline(2, 4)):
        y = 34 + stage * 52
        p.text(16, y + 18, f"stage {stage}", "start", 13, bold=True)
        p.box(84, y, 15 * unit, 36, "", "#f2f3f6", dashed=True)
        for kind, microbatch, start in done:
            width, fill = (unit, RANK[0]) if kind == "F" else (2 * unit, RANK[1])
            p.box(84 + start * unit, y, width, 36, f"{kind}{microbatch}", fill)
    p.note(
        84, 150, "F: forward, B: backward, with the microbatch's number; dashed: bubble", "start"
    )
    return p

"""Pictures of the other pages: the search, the memory of a step, a step, the modes."""

from __future__ import annotations

from picture import NODE, PENDING, PLAIN, RANK, WIRE, Picture, picture


@picture
def search() -> Picture:
    p = Picture(
        760,
        250,
        "The search: an enumeration outside, an integer linear program inside, then a full count",
    )
    p.box(
        16,
        30,
        190,
        180,
        "parallel configurations\n\npipeline size\nmesh\nmicrobatches\nschedule, chunks\nmode",
        PLAIN,
    )
    p.arrow(208, 120, 262, 120, "bounds")
    p.box(
        264,
        30,
        190,
        180,
        "integer linear program\n\nstrategy of each node\nconversion on each edge\n"
        "keep or recompute\nat a price of memory",
        PLAIN,
    )
    p.arrow(456, 120, 510, 120, "solutions")
    p.box(512, 30, 106, 180, "candidates\n\nstage cuts\na solution\nfor each unit", PLAIN)
    p.arrow(620, 120, 654, 120)
    p.box(656, 30, 88, 180, "plan\n\nevery byte\ncounted\nbuckets\ncounted", RANK[2])
    p.arrow(700, 212, 566, 212, bend=36)
    p.note(633, 240, "too large: again, with less room")
    return p


@picture
def memory() -> Picture:
    p = Picture(760, 290, "The memory of a device during a step")
    p.arrow(60, 250, 740, 250)
    p.arrow(60, 250, 60, 20)
    p.note(66, 22, "bytes", "start")
    p.note(736, 266, "time", "end")
    bands = [
        ("parameters and optimizer state", RANK[0], [(60, 250), (60, 200), (730, 200), (730, 250)]),
        ("gathered parameters", RANK[3], [(80, 200), (80, 178), (590, 178), (590, 200)]),
        ("activations", RANK[2], [(100, 178), (330, 70), (560, 178)]),
        (
            "gradients",
            RANK[1],
            [(330, 70), (560, 140), (700, 140), (700, 200), (590, 200), (590, 178), (560, 178)],
        ),
        ("transient", PENDING, [(325, 72), (325, 46), (345, 46), (345, 76), (330, 70)]),
    ]
    for _, fill, points in bands:
        corners = " ".join(f"{x},{y}" for x, y in points)
        p.parts.append(f'<polygon points="{corners}" fill="{fill}" stroke="{WIRE}"/>')
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
    lanes = [
        (
            "compute",
            40,
            [
                ("F0", 150, 70, RANK[0]),
                ("B0", 222, 110, RANK[1]),
                ("F1", 334, 70, RANK[0]),
                ("B1", 406, 110, RANK[1]),
                ("optimizer", 590, 80, RANK[3]),
            ],
        ),
        (
            "links",
            100,
            [
                ("gather", 96, 52, RANK[2]),
                ("bucket 2", 446, 44, PENDING),
                ("bucket 1", 492, 44, PENDING),
                ("bucket 0", 538, 48, PENDING),
            ],
        ),
    ]
    for name, y, spans in lanes:
        p.text(16, y + 18, name, "start", 13, bold=True)
        for text, x, width, fill in spans:
            p.box(x, y, width, 36, text, fill, 11)
    p.note(
        420,
        160,
        "a bucket of gradients starts when the last backward has made all of them, once a step",
    )
    p.note(420, 182, "bucket 0 has nothing left to hide behind: its time is in the step")
    return p


@picture
def modes() -> Picture:
    p = Picture(760, 230, "How a weight and the activations lie in each mode")
    p.text(16, 76, "weight", "start", 13, bold=True)
    p.text(16, 166, "activations", "start", 13, bold=True)
    for i, (name, weight, activations) in enumerate(
        (
            ("1d, 4 ranks", (1, 4), (1, 1)),
            ("2d, 4 ranks", (2, 2), (2, 2)),
            ("2.5d, 8 ranks", (2, 2), (4, 2)),
            ("3d, 8 ranks", (4, 2), (4, 2)),
            ("sequence, 4 ranks", (1, 1), (4, 1)),
        )
    ):
        x = 100 + i * 132
        p.text(x + 50, 22, name, bold=True, size=12)
        for (rows, columns), y in ((weight, 42), (activations, 130)):
            for r in range(rows):
                for c in range(columns):
                    p.box(
                        x + c * 100 / columns,
                        y + r * 70 / rows,
                        100 / columns,
                        70 / rows,
                        "",
                        RANK[r * columns + c] if rows * columns > 1 else NODE,
                    )
    p.note(
        380,
        216,
        "activations: rows are samples and sequence, columns features; a colour: a rank; grey: all",
    )
    return p

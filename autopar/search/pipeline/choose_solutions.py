"""Which solution each unit of one stage takes, so that the stage fits its memory and is fast.

Equal units are interchangeable. So an integer program decides how many of each class take which
solution, and neighbours of one class then take the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import highspy
import numpy as np

from autopar.search.ilp.programs.silent_highs import SilentHighs


def choose_solutions(
    seconds: np.ndarray, nbytes: np.ndarray, unit_class: np.ndarray, room: float
) -> np.ndarray | None:
    """The solution of each unit of a stage.

    Args:
        seconds, nbytes: [solution, unit].
        unit_class: [unit]: equal units have one number.
        room: bytes that the units may take together.

    Returns:
        [unit]: the number of the solution. None where no choice fits.
    """
    units = seconds.shape[1]
    fastest = seconds.argmin(axis=0)
    if nbytes[fastest, np.arange(units)].sum() <= room:
        return fastest
    sizes = Counter(unit_class.tolist())
    first = {c: int(np.argmax(unit_class == c)) for c in sizes}
    counts = _solution_counts(
        [(n, seconds[:, first[c]], nbytes[:, first[c]]) for c, n in sizes.items()], room
    )
    if counts is None:
        return None
    result = np.zeros(units, dtype=int)
    for c, row in zip(sizes, counts, strict=True):
        result[unit_class == c] = np.repeat(np.arange(len(row)), row)
    return result


def _solution_counts(
    classes: Sequence[tuple[int, np.ndarray, np.ndarray]], room: float
) -> list[np.ndarray] | None:
    """How many of the ``n`` units of each class (n, seconds, bytes) take each solution, so that all
    fit together and take least time.
    """
    highs = SilentHighs()
    seconds = np.concatenate([s for _, s, _ in classes])
    nbytes = np.concatenate([b for _, _, b in classes])
    width = len(classes[0][1])
    scale = 1e3 / max(float(seconds.max()), 1e-30)
    for value in seconds * scale:
        highs.addVar(0.0, highspy.kHighsInf)
        highs.changeColCost(highs.numVariables - 1, float(value))
    total = len(seconds)
    highs.changeColsIntegrality(
        total, np.arange(total, dtype=np.int32), np.full(total, highspy.HighsVarType.kInteger)
    )
    for i, (n, _, _) in enumerate(classes):
        columns = np.arange(i * width, (i + 1) * width, dtype=np.int32)
        highs.addRow(n, n, width, columns, np.ones(width))
    # The row of memory is in units of the room, because HiGHS has absolute tolerances.
    relative = nbytes / max(room, 1.0)
    highs.addRow(-highspy.kHighsInf, 1.0, total, np.arange(total, dtype=np.int32), relative)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    x = np.round(np.array(highs.getSolution().col_value)).astype(int)
    return [x[i * width : (i + 1) * width] for i in range(len(classes))]

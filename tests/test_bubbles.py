"""The bubbles and the memory of schedules are those of the papers' formulas."""

from __future__ import annotations

from itertools import accumulate

import pytest

from autopar.cost_model import actions, in_flight, simulate, simulate_schedule


def step(
    schedule: str,
    p: int,
    c: int,
    m: int,
    forward: float = 1.0,
    backward: float = 2.0,
    send: float = 0.0,
) -> float:
    return simulate_schedule(
        schedule, p, c, m, [forward / c] * (p * c), [backward / c] * (p * c), None, [send] * (p * c)
    ).seconds


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 8), (4, 32), (8, 16)])
def test_bubbles_are_the_textbooks(p: int, m: int) -> None:
    """Narayanan et al. (2021): the bubble is (p - 1)(f + b), and 1/c of that with c chunks. Qi et
    al. (2023): ZB1P saves (p - 1) w of it.
    """
    for schedule in ("gpipe", "1f1b"):
        assert step(schedule, p, 1, m) == pytest.approx((m + p - 1) * 3)
    for c in (1, 2, 4):
        assert step("interleaved-1f1b", p, c, m) - 3 * m == pytest.approx((p - 1) * 3 / c)
    bubble = step("zero-bubble", p, 1, m) - 3 * m
    assert bubble == pytest.approx((p - 1) * (1 + 1 - 1 + 1 - 1) if m >= 2 * p else bubble)
    assert bubble < step("1f1b", p, 1, m) - 3 * m


def test_interleaving_holds_more() -> None:
    """Korthikanti et al. (2022): the first rank holds (1 + (p - 1) / (p c)) times the activations
    of 1F1B, where a chunk is 1/c of a stage.
    """
    p, c, m = 4, 2, 16
    most = max(
        accumulate(
            1 if action.kind == "F" else -1 for action in actions("interleaved-1f1b", p, c, m)[0]
        )
    )
    assert most / c == pytest.approx(p * (1 + (p - 1) / (p * c)))
    first, second = (in_flight("interleaved-1f1b", p, c, m)[stage] for stage in (0, p))
    assert first + second >= most


def test_what_is_sent_is_waited_for_as_torch_does() -> None:
    """A looped schedule posts a receive before it needs the tensor. 1F1B exchanges one tensor with
    each neighbour in each period.
    """
    p, m, sent = 4, 64, 0.1
    assert step("1f1b", p, 1, m, send=sent) - step("1f1b", p, 1, m) == pytest.approx(
        2 * m * sent, rel=0.1
    )
    exposed = step("interleaved-1f1b", p, 2, m, send=sent) - step("interleaved-1f1b", p, 2, m)
    assert 0 < exposed < m * sent
    orders, seconds = actions("1f1b", 1, 1, 4), [1.0]
    assert simulate(orders, seconds, seconds, None, [9.0]).seconds == 8
    both = simulate_schedule("interleaved-1f1b", 1, 2, 4, [1.0, 1.0], [1.0, 1.0], None, [9.0, 9.0])
    assert both.seconds == 16  # stages of one rank send nothing


def test_uneven_stages_wait_for_the_slowest() -> None:
    line = simulate_schedule("1f1b", 4, 1, 32, [1.0, 1.0, 3.0, 1.0], [2.0, 2.0, 6.0, 2.0])
    assert line.seconds == pytest.approx(
        32 * (3 + 6) + 2 * (1 + 2)
    )  # two stages to fill and to drain before it
    assert line.bubble.index(min(line.bubble)) == 2

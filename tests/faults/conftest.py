"""The table of faults, which pytest prints after the tests."""

from __future__ import annotations

from typing import Any

import pytest
from tabulate import tabulate

Row = tuple[str, int, float, float]
ROWS = pytest.StashKey[list[Row]]()


@pytest.fixture
def rows(request: pytest.FixtureRequest) -> list[Row]:
    """Rows of the table, to which tests add."""
    return request.config.stash.setdefault(ROWS, [])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if table := config.stash.get(ROWS, []):
        headers = ("fault", "steps lost", "seconds to the error", "seconds to the next step")
        terminalreporter.section("faults")
        terminalreporter.write_line(tabulate(table, headers, floatfmt=".1f"))

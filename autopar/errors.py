"""The exceptions that autopar raises on purpose: one family, so a caller can catch all of it."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose."""


class CaptureError(AutoparError):
    """The model could not be turned into a graph; the message names the module, the source line and
    what usually helps.
    """


class PlanError(AutoparError):
    """No plan satisfies what was asked; the message gives the numbers and the options that would
    change them.
    """


class BudgetError(PlanError):
    """No plan fits the memory of a device; ``least`` is the fewest bytes that any needs."""

    def __init__(self, message: str, least: float = 0.0) -> None:
        super().__init__(message)
        self.least = least


class RunError(AutoparError):
    """A compiled program met something at run time that its plan does not cover."""

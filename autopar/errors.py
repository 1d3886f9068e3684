"""The exceptions that autopar raises on purpose: one family, so that one clause catches them
all.
"""

from __future__ import annotations

from typing import Any, TypeVar

SomeError = TypeVar("SomeError", bound=BaseException)


class AutoparError(Exception):
    """Base of every error that autopar raises on purpose."""


class CaptureError(AutoparError):
    """The model could not be captured as a graph.

    The message names the module, the source line and the usual remedy.
    """


class PlanError(AutoparError):
    """No plan satisfies the options.

    The message gives the numbers and the options that would change them.
    """


class BudgetError(PlanError):
    """No plan that was found fits the memory of a device. ``least`` is the fewest bytes of a device
    that one of them needs.
    """

    def __init__(self, message: str, least: float) -> None:
        super().__init__(message)
        self.least = least

    def __reduce__(self) -> tuple[type[BudgetError], tuple[str, float], dict[str, Any]]:
        return type(self), (str(self), self.least), self.__dict__


class RunError(AutoparError):
    """A compiled program cannot run as its plan says, for example because ranks differ."""


class CheckpointError(RunError):
    """A checkpoint was not saved, for example because the disk is full. Those before are whole, and
    the run can go on.
    """


def without_frames(error: SomeError) -> SomeError:
    """``error``, to be kept: without its traceback and the errors before it. The variables of the
    frames that a traceback has would live as long as the error, such as all problems of a search.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def first_line(error: BaseException) -> str:
    """The first line of the text of another library's error, of 300 characters at most."""
    return next(iter(str(error).strip().splitlines()), "")[:300]

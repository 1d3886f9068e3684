"""A guard against calls of a program inside of its own call."""

from __future__ import annotations

from autopar.errors import RunError


class CallGuard:
    """A context for a call of a program."""

    def __init__(self) -> None:
        self._is_open = False

    def __enter__(self) -> None:
        """Raises :class:`RunError` inside of a call."""
        if self._is_open:
            raise RunError(
                "the compiled model is called inside of its own call, in which its backward runs "
                "under a pipeline and in microbatches: torch.utils.checkpoint around the model "
                "does this. Call the model without; the plan recomputes what it has to (recompute=)"
            )
        self._is_open = True

    def __exit__(self, *_: object) -> None:
        self._is_open = False

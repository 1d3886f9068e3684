"""A guard against calls of a program that would not do what a call of the model does: inside of its
own call, after values have changed that it has from its trace, and under code that acts on each
call in a forward.
"""

from __future__ import annotations

from autopar.capture.frozen_values import FrozenValues
from autopar.capture.interception import (
    check_function_modes,
    check_no_hooks_of_all_modules,
    users_function_modes,
)
from autopar.errors import RunError


class CallGuard:
    """A context for a call of a program.

    Args:
        frozen: the values that the program has from its trace, if they are known.
        modes: the function modes in which it was traced; None: those that are active.
    """

    def __init__(self, frozen: FrozenValues | None = None, modes: list[type] | None = None) -> None:
        self._frozen, self._is_open = frozen, False
        self._modes = users_function_modes() if modes is None else modes

    def copy(self) -> CallGuard:
        """The guard of another program of the same trace."""
        return CallGuard(self._frozen, self._modes)

    def check(self) -> None:
        """Raises :class:`RunError` where a value has changed that the program has from its trace,
        or where code outside of the model would act on the calls in its forward.
        """
        check_no_hooks_of_all_modules(RunError)
        check_function_modes(self._modes)
        if self._frozen is not None:
            self._frozen.check()

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

"""The precision "tf32": float32 matrix products on a GPU's tensor cores, which round operands to 10
bits of mantissa. It holds while a program runs, and not after.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.errors import RunError


class MatmulPrecision:
    """Sets torch's float32 matmul precision to "high", if ``tf32``, from :meth:`open` to
    :meth:`close`, or in a ``with`` block. Then restores it.
    """

    def __init__(self, tf32: bool) -> None:
        self._tf32 = tf32
        self._restore: Callable[[], None] | None = None

    def open(self) -> None:
        """Sets the precision, unless it is set already."""
        if not self._tf32 or self._restore is not None:
            return
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError as e:
            raise RunError(
                "precision='tf32' sets torch's float32 matmul precision while the program runs, "
                "but this process has set it in two ways that disagree: use "
                "torch.set_float32_matmul_precision alone, not torch.backends.*.fp32_precision"
            ) from e
        backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        # set_float32_matmul_precision would turn "not set" of a backend into "highest".
        by_backend = [backend.fp32_precision for backend in backends]

        def restore() -> None:
            torch.set_float32_matmul_precision(before)
            for backend, precision in zip(backends, by_backend, strict=True):
                backend.fp32_precision = precision

        torch.set_float32_matmul_precision("high")
        self._restore = restore

    def close(self) -> None:
        """Restores the precision."""
        if self._restore is not None:
            self._restore()
            self._restore = None

    def __enter__(self) -> None:
        self.open()

    def __exit__(self, *error: object) -> None:
        self.close()

"""float32 matrix products on tensor cores, in which a GPU rounds their operands to 10 bits: while a
program runs, and not after it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.errors import RunError


class MatmulPrecision:
    """Between :meth:`open` and :meth:`close`, or within ``with``, torch's float32 matmul precision
    is "high", if ``wanted``; then what it was before."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._restore: Callable[[], None] | None = None

    def open(self) -> None:
        """From here on; no change where it is open already."""
        if not self.wanted or self._restore is not None:
            return
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError as e:
            raise RunError(
                "precision='tf32' sets torch's float32 matmul precision while the program runs, "
                "but this process has set it in two ways "
                "that disagree: use torch.set_float32_matmul_precision alone, not "
                "torch.backends.*.fp32_precision"
            ) from e
        backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        finer = [backend.fp32_precision for backend in backends]

        def restore() -> None:
            torch.set_float32_matmul_precision(before)
            for backend, precision in zip(
                backends, finer, strict=True
            ):  # which "not set" is not the same as "highest" for
                backend.fp32_precision = precision

        torch.set_float32_matmul_precision("high")
        self._restore = restore

    def close(self) -> None:
        """Up to here."""
        if self._restore is not None:
            self._restore()
            self._restore = None

    def __enter__(self) -> None:
        self.open()

    def __exit__(self, *error: object) -> None:
        self.close()

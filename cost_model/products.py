"""The rates of measured matrix products, and of products whose size lies between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.cost_model.checks import check_fraction, check_positive

FloatArray = npt.NDArray[np.float64]
NEIGHBOURS = 4  # measured products that a rate is interpolated between


@dataclass(frozen=True)
class Product:
    """A measured matrix product.

    ``count`` products of [rows, inner] x [inner, columns] ran at ``share`` of the device's peak.
    """

    count: int
    rows: int
    columns: int
    inner: int
    share: float

    def __post_init__(self) -> None:
        for name in ("count", "rows", "columns", "inner"):
            check_positive(f"device.products.{name}", getattr(self, name))
        check_fraction("device.products.share", self.share, "the peak", zero=False)


class ProductRates:
    """The part of the peak that a product of any size reaches, from ``products``.

    Sizes are compared by their logarithms. A measured size has its measured rate, or the mean of
    them where it was measured several times. Other sizes have the mean of the NEIGHBOURS nearest
    sizes, weighted by the inverse square of the distance.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        sizes = np.array([[p.count, p.rows, p.columns, p.inner] for p in products], dtype=float)
        self._points = _coordinates(sizes)
        self._shares = np.array([p.share for p in products])

    @property
    def largest(self) -> float:
        """The largest share that a product of any size reaches."""
        return float(self._shares.max())

    def share(
        self, count: FloatArray, rows: FloatArray, columns: FloatArray, inner: FloatArray
    ) -> FloatArray:
        """The part of the peak; the sizes broadcast."""
        sizes = np.stack(np.broadcast_arrays(count, rows, columns, inner), axis=-1)
        asked = _coordinates(np.maximum(sizes, 1.0))
        squares = ((asked[..., None, :] - self._points) ** 2).sum(-1)
        nearest = np.argsort(squares, axis=-1, kind="stable")[..., :NEIGHBOURS]
        near = np.take_along_axis(squares, nearest, axis=-1)
        exact = squares < 1e-9
        mean = (exact * self._shares).sum(-1) / np.maximum(exact.sum(-1), 1)
        weights = 1 / np.maximum(near, 1e-9)
        between = (weights * self._shares[nearest]).sum(-1) / weights.sum(-1)
        return np.where(exact.any(-1), mean, between)


def _coordinates(sizes: FloatArray) -> FloatArray:
    """Logarithms of [..., (count, rows, columns, inner)]. A product and its transpose are alike."""
    logs = np.log2(sizes)
    sides = np.sort(logs[..., 1:3], axis=-1)
    return np.concatenate([logs[..., :1], sides, logs[..., 3:]], axis=-1)

"""A file of settings, which a model's own file imports."""

from __future__ import annotations

GAIN = 1.25

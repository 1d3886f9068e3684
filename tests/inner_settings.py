"""A file of settings, which a forward imports where it runs."""

from __future__ import annotations

POWER = 2

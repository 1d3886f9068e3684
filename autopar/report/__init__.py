"""A plan for people."""

from autopar.report.describe import describe
from autopar.report.text import text

__all__ = ["describe", "text"]

"""A plan for people."""

from autopar.report.describe import describe
from autopar.report.text import text
from autopar.report.timeline import timeline
from autopar.report.trace import trace

__all__ = ["describe", "text", "timeline", "trace"]

"""A plan for people."""

from autopar.report.chrome_trace import chrome_trace
from autopar.report.report_rows import add_report_rows
from autopar.report.report_text import report_text
from autopar.report.timeline import draw_timeline

__all__ = ["add_report_rows", "report_text", "draw_timeline", "chrome_trace"]

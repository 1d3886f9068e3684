"""What does a plan say to a reader? Rows of plain data, and texts and files made from them.

Reading order: ``report_rows`` adds rows to a plan while the graph is at hand. ``block_rows``,
``collective_rows`` and ``recomputation_rows`` make them, with the names of ``module_paths``,
``split_words`` and ``mode_words``. ``report_text`` prints the rows, with ``pipeline_tables`` for
stages and ranks. ``timeline`` draws the schedule as text, ``chrome_trace`` writes it for a viewer.
"""

from autopar.report.chrome_trace import chrome_trace
from autopar.report.report_rows import add_report_rows
from autopar.report.report_text import report_text
from autopar.report.timeline import draw_timeline

__all__ = ["add_report_rows", "chrome_trace", "draw_timeline", "report_text"]

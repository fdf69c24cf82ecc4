"""Quantization error of an artifact: summary, JSON document and web page.

`open_report` reads the records that a run left beside an artifact, `open_measuring` makes them
from artifact and source; `summarize` draws them once; `report_document` and `render_page` show
the result.
"""

from mxconvert.report.document import report_document
from mxconvert.report.load import open_report
from mxconvert.report.measure import Measuring, open_measuring
from mxconvert.report.page import render_page
from mxconvert.report.summary import DEFAULT_TOP, Summary, summarize
from mxconvert.report.text import printable

__all__ = [
    "DEFAULT_TOP",
    "Measuring",
    "Summary",
    "open_measuring",
    "open_report",
    "printable",
    "render_page",
    "report_document",
    "summarize",
]

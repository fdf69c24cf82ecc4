"""A report as one HTML page that needs nothing else: no network, no other file.

Tables and charts are in the markup and need no script; the script adds sorting, filters, the
heat map and the drill-down from embedded numbers. The same input gives the same bytes.
"""

from mxconvert.report.page.render import render_page

__all__ = ["render_page"]

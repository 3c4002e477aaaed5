"""A run as a page to look at: one HTML file with its drawings, which needs no network (docs/report.md)."""

from fourfold.diagnostics.report_page.page import Contents, missing, report_page

__all__ = ["Contents", "missing", "report_page"]

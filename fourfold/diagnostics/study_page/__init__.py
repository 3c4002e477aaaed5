"""A study as a page to look at: variants side by side in one HTML file, which needs no network (docs/studies.md)."""

from fourfold.diagnostics.study_page.page import study_page

__all__ = ["study_page"]

"""A plan as a page to look at: one HTML file with its drawings, which needs no network and no script (docs/plan.md)."""

from fourfold.diagnostics.plan_page.page import plan_page

__all__ = ["plan_page"]

"""A plan for people and for other tools: a page, a picture, a trace, a snapshot. All read the plan and nothing else."""

from lowtide.report.memory_viz import memory_viz
from lowtide.report.page import page
from lowtide.report.picture import save_picture
from lowtide.report.save import check_report, save

__all__ = ["check_report", "memory_viz", "page", "save", "save_picture"]

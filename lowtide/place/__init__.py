"""Addresses of buffers in the smallest arena: placers that are values, as in `schedule`."""

from lowtide.place.base import Anytime, Placement, Placer, Status, answers

__all__ = ["Anytime", "Placement", "Placer", "Status", "answers"]

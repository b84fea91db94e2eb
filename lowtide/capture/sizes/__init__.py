"""Sizes that are not fixed: torch's symbolic integers on one side, sizes of the graph on the other."""

"""The Plan: what was decided about a graph, what that promises, and how it is told to people. No torch."""

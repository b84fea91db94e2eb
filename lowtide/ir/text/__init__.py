"""Graphs, values, arguments and sizes as text, and back."""

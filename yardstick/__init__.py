"""Instances of four problems of memory, the best values known, bounds, and a judge that needs none of lowtide: see README.md."""

"""Deciding: from a graph to a plan."""

"""Deciding for a whole range of shapes at once."""

"""Addresses by the papers' own methods."""

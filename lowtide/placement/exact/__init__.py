"""Placements proven to need the smallest arena, or a gap that is proven."""

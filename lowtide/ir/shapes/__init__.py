"""Sizes over named dimensions: what they are at a point, which of two is less over a range, which are equal. No torch, no graph search."""

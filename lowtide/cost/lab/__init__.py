"""Operators tried on made-up data: where that does no harm, each distinct call once."""

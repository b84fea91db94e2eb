"""What operators do, one row each, by their names alone: rewrites, costs, capture and programs all read the same row. No torch."""

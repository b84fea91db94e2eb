"""Algebra: other operators for the same numbers. One rule a row of `table`; what each means stands in the file that finds its places."""

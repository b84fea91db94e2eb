"""Algebra: other operators for the same numbers. One rule a row of `rewritings`; what each means stands where its places are found."""

"""Generated networks at run time: built once, their constants packed, run by a team of threads."""

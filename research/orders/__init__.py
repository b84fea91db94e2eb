"""The order of execution by the papers' own methods."""

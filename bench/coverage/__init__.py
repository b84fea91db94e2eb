"""How many programs that nobody here wrote are trained, refused, or broken: see `__main__.py`."""

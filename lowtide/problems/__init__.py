"""Bare problems, to be ordered or placed: integer arrays and their files, with no graph and no torch in sight."""

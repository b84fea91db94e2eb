"""What every room may use: files, folders, caches, locks, compiled kernels, fields of JSON, solvers as text. No idea of the house in it.

And which lowtide this is: said here, as a checkout that nobody installed has no metadata to be asked. pyproject.toml reads it.
"""

VERSION = "0.2.0.dev0"

"""Which lowtide this is: said here, as a checkout that nobody installed has no metadata to be asked. pyproject.toml reads it."""

VERSION = "0.1.0"

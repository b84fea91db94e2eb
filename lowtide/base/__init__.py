"""What every room may use: files, folders, caches, locks, compiled kernels, fields of JSON, solvers as text. No idea of the house in it."""

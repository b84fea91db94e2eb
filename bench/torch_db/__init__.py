"""torch's own test databases of operators and modules, run by eager and by lowtide."""

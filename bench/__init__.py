"""What lowtide is measured on and how: one script for each table, `python -m bench.<table>`; results under `bench/results/`."""

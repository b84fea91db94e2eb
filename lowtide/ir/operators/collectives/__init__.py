"""What the processes of a group do together, as operators: their rows, and what a node of them is."""

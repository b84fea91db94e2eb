"""What a program does beside computing, and how each step does it again: a table of the kinds is in the guide."""

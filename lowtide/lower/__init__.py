"""From a plan to a program."""

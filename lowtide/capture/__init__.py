"""From a running PyTorch program to a graph."""

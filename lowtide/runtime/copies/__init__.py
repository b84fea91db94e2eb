"""Copies to the host and back while a program runs."""

"""Inference functions as files: what they are made of is written down, and made anew from there in a process that has no model."""

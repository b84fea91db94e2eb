"""A step's own memory: recorded, planned, served."""

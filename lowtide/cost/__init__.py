"""What a program costs: bytes over time, and time."""

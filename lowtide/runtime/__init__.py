"""What a program needs while it runs."""

"""Whether what a program takes for granted still holds."""

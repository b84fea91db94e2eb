"""What a program reads from its data: facts that are looked up again before each step."""

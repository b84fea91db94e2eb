"""What a capture must not touch, miss or leave behind."""

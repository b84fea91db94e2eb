"""What a step consists of: programs made ready to run, and what happens when a batch or the model is not as it was."""

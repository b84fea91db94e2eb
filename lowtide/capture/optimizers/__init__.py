"""Optimizers' steps, from their own code: numbers that change, state, wrappers, scalers."""

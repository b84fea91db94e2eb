"""Order and addresses together."""

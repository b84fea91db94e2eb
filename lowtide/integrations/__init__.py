"""Where people train: adapters to training frameworks, each imported by its users alone. They call `optimize`, and decide nothing."""

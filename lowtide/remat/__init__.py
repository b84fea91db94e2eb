"""Recomputation and offload: schedules in which a node may run again and a tensor may leave for the host."""

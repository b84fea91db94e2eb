"""The search over schedules that fills the archive of peak against time."""

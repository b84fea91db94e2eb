"""Whole schedules under a limit, by eviction with look-ahead."""

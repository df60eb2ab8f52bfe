"""Plans ahead of time, for hardware that need not be present: allocates and runs nothing."""

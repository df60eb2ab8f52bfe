"""Rates and times of this machine, measured the way the runtime works."""

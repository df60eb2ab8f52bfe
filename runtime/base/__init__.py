"""Utilities used by the rest of the runtime: threads, limits, counters, clocks, pages."""

"""Tools that the rest of the runtime stands on: threads, limits, counters, clocks, pages."""

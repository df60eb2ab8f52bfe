"""Memory of the host and of malloc: arenas, pinning, the heap's limits, aliases of host pages."""

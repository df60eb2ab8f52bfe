"""Host memory and malloc: arenas, pinning, heap limits, device aliases of host memory."""

"""Learns which execution and blocks come next (DeepUM). Pure code, driven by a runtime."""

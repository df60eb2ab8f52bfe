"""Gradients and optimizer states: the channels that carry them, their stores, the updates."""

"""Moves of tensors while graphs run: the ops in the graphs, the mover, the cache beside plans."""

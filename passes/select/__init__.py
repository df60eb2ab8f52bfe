"""Choices among candidates: covers of crowded moments, knapsacks, cuts, chains to compute again.

In: sizes, times and pressure at each moment. Out: which tensors, ops, weights or updates to take.
"""

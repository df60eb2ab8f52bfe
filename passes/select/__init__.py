"""Selection among candidates: covers of crowded positions, knapsacks, cuts, recomputation chains.

Input: sizes, times and pressure at each position. Output: the tensors, ops, weights or updates to
take.
"""

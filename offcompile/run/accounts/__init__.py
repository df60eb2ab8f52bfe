"""Accounts for device memory outside of plans: parameters, live results, runs, placements.

In: which graphs run and what they leave behind. Out: bytes held by others than the planned graph.
"""

"""Finds the largest batch that fits by planning, and the one with the most samples per second.

In: a model and a function that makes inputs of a batch. Out: the batches that were planned, traced
one by one, and the smallest one that does not fit.
"""

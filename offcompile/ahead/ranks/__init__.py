"""Forecasts the step of one of several ranks, without any of them.

In: a traced model, the number of ranks, how they share it and the link between them. Out: the step
of one rank as it is planned, with its collectives simulated beside the plan's own copies.
"""

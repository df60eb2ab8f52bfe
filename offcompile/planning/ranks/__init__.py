"""Times a step with the collectives that run beside it.

In: the collectives of a step, and the link that they take. Out: timelines of plans beside them, by
which searches compare plans.
"""

"""Search over whole plans: variants that a policy builds, judges and improves.

In: a judge and the decisions so far. Out: better decisions, within a counted number of plans.
"""

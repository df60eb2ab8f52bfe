"""Search over whole plans: variants that a policy builds, judges and improves.

Input: a judge and the decisions so far. Output: better decisions, within a limited number of plans.
"""

"""Plans for one problem: judged, fitted to a budget, and put into an order that rests on no clock.

In: a `Problem` and a `Machine`. Out: a plan with its certificate (`planner`), the smallest machine
that holds it (`decide`), the program that runs whatever the lanes do (`order`, `presence`), and the
addresses that its tensors would take (`planned_layout`). Knows nothing of torch's graphs.
"""

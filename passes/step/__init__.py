"""One training step of several graphs, planned as one: its record, its problem, its table.

In: what graph executions save and read, how long they take, and the room that each leaves beside
its own plan. Out: a problem with one op per execution; and, from a plan of that problem, a table
that tells each saved tensor to stay, or to go and when to come back. Pure code, driven by a
runtime.
"""

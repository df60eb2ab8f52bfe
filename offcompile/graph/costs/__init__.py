"""The time and workspace of each op: measured where it can be, by a roofline elsewhere.

In: graphs and hardware figures. Out: microseconds and bytes for each node.
"""

"""Finds the time and workspace of each op, by measurement if possible, else by a roofline.

In: graphs and hardware figures. Out: microseconds and bytes for each node.
"""

"""Lets the ranks of a process group tell each other, through its store and without a collective.

In: the fate of a graph on this rank. Out: the refusal of another rank, raised here.
"""

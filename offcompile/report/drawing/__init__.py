"""Drawings of graphs before and after a plan.

In: a graph of torch. Out: boxes and edges, as text for Graphviz (`dot`) or laid out as SVG (`svg`).
"""

"""Graphs that carry out a plan: moves inserted, ops in the planned order, compiled by Inductor."""

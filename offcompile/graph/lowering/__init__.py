"""Lowers a plan into graphs: inserts moves, orders ops as planned, compiles with Inductor."""

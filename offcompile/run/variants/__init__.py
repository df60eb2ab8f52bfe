"""Chooses the plan that a call of a captured graph runs, and makes another one if none fits.

`plans` holds the plans of one graph, each compiled; `ladder` lists the candidates for a call in
order; `judging` replaces plans that measured steps speak against.
"""

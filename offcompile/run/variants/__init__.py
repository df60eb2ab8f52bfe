"""Chooses the plan that a call of a captured graph runs, and makes another one if none fits.

`variant` is one plan, compiled; `plans` holds those of one graph and compiles more; `ladder` lists
the candidates for a call in order; `hosting` and `emptying` are two of them; `judging` replaces
plans that measured steps speak against.
"""

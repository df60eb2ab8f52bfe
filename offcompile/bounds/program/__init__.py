"""The linear program of a step: every valid plan satisfies it, so its optimum is a bound.

In: a survey, and a grid of slots (`grid`), which may merge tensors (`merge`). Out: the program
(`model`) of columns and rows (`matrix`) for the time of the slots (`times`) and for the places of
tensors (`residence`, `stay`, `access`); and the bound that its solution proves (`solve`).
"""

"""The cheapest cover of a need that differs by position.

In: the need at each position, and items that each cover a range of positions at a cost. Out: the
items to take. One position is a knapsack (`knapsack`), consecutive ones take turns in a sweep
(`intervals`), and a search improves on both (`search`).
"""

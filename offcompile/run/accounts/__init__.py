"""Device memory that no plan counts: parameters, results alive, graphs on their way, placements.

In: which graphs run and what they leave behind. Out: bytes held beside the graph that is planned.
"""

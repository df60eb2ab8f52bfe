"""Plans one captured graph: graphs in, a `Planned` out. Nothing here knows how a step runs.

`request` says what is asked for, `candidates` tries the ways to plan in order, `placement` puts
weights on the device or on the host, `planner` searches within one of these ways, and `plan_graph`
makes a `Planned` of the best.
"""

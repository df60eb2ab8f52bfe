"""Plans one captured graph: graphs in, a `Planned` out. Nothing here knows how a step runs.

`contract` defines what comes in and out, and `plan_graph` is the way between. `candidates` tries
the ways to plan in order; `planner` searches within one of them, with weights on the device or on
the host. `carry_out` rewrites the graphs.
"""

"""Steps as CUDA graphs (`options={"cudagraphs": True}`): captured once a plan has settled, then
replayed with one call for each half.

In: the compiled halves of a planned graph, and the arguments of each run. Out: their results, as
the halves themselves would have given them, or None where a run has to take the usual path.
`step_graph` captures and replays, `places` knows static memory, `room` counts what graphs take,
`refusals` knows what stands in the way.
"""

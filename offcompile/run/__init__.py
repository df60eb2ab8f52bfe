"""The backend at run time: graphs are planned at the first call, then stepped and measured.

In: the graphs that `torch.compile` hands over. Out: a callable, its reports and its recordings.
Start at `captured_graph`: it is the main path of a call, in order. `backend` is the entry point,
`variants` chooses the plan of a call, `compile_hooks` hooks into the lowering, `plan` plans,
`running_step` wraps what runs, `accounts` count the device memory that no plan includes.
"""

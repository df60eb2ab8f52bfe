"""The backend at run time: graphs are planned at the first call, then stepped and measured.

In: the graphs that `torch.compile` hands over. Out: a callable, its reports and its recordings.
`backend` is the entry point, `compiled` holds the variants of one function, `pipeline` plans and
lowers one of them, `accounts` count the device memory that no plan includes.
"""

"""The backend at run time: graphs are planned at the first call, then stepped and measured.

In: what `torch.compile` hands over. Out: a callable, its reports and its recordings. `backend` is
the entry, `compiled` holds the variants of one function, `pipeline` plans and lowers one of them,
`accounts` count what lies on the device outside of any plan.
"""

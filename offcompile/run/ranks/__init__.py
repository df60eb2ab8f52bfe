"""Lets the ranks of a process group agree, through its store and without a collective.

In: the fate of a graph on this rank, or a DDP module whose forward runs. Out: the refusal of
another rank, raised here; a module's gradients reduced inside backward, on all ranks or on none.
"""

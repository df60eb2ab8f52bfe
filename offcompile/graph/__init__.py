"""The interface to torch's graphs: builds problems from FX graphs, and writes plans into them.

In: forward and backward graphs as AOTAutograd partitions them. Out: a `Problem` with costs and
names (`annotate`, `storages`, `costs`), variants of the graphs with better plans (`mask_bits`,
`split`, `dropout`, `in_backward_updates`, `kernels`), the weights that live on the host
(`weight_placement`), and graphs that carry out a plan (`lowering`).
"""

"""The edge to torch's graphs: problems out of FX graphs, and plans back into them.

In: forward and backward graphs as AOTAutograd partitions them. Out: a `Problem` with costs and
names (`annotate`, `costs`), variants of the graphs that plan better (`compact`, `split`, `dropout`,
`offers`, `kernels`), the weights that live on the host (`choose`), and graphs that carry out a plan
(`lowering`).
"""

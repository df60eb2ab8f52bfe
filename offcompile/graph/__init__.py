"""The interface to torch's graphs: builds problems from FX graphs, and writes plans into them.

In: forward and backward graphs as AOTAutograd partitions them. Out: a `Problem` with costs and
names (`annotate`, `costs`), variants of the graphs with better plans (`compact`, `split`,
`dropout`, `offers`, `kernels`), the weights that live on the host (`choose`), and graphs that carry
out a plan (`lowering`).
"""

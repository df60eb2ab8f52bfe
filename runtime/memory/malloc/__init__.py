"""The CPU target's device memory: malloc, kept to a budget, and torch's tensors in it.

In: the budget of a step and the bytes that its plan has allocated already (`heap.begin`). Out: a
process that stays within it, and the figures of that: the peak, the holes, the returned pages.

- `glibc`: malloc's settings and figures, huge pages for its heap, its freed memory given back
- `heap`: keeps freed blocks while the budget allows, and returns their pages when it does not
- `tensor_memory`: an allocator for torch whose freed blocks fit again, and which asks the heap's
  limit before a tensor's pages are touched
- `launch`, `advice`: settings of malloc for where that allocator cannot be compiled, and who needs
  them
- `fragmentation`: a model of all this, which predicts the pages that a plan touches again
"""

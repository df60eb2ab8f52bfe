"""The optimizer on several ranks: shards of tensors, and gradients that DDP sums."""

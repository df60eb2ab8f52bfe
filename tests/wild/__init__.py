"""Programs as people write them, none of them for this backend: each must give the same bits."""

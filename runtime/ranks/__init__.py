"""Reduces gradients over ranks while backward goes on: buckets, and how ranks add them up."""

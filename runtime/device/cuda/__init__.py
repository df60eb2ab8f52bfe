"""The CUDA device: calls into the driver and runtime, copies, staging, packing, direct files."""

"""Devices as the runtime sees them: lanes, streams, copies, tickets; the CPU target and CUDA."""

"""Spill files with direct I/O: places, growth, stripes, queues and checksums."""

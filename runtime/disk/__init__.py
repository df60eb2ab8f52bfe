"""Spill files with direct I/O: directories, growth, striping, queues and checksums."""

"""The only room with effects: memory, files, threads, and the operators that graphs call."""

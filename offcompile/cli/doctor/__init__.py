"""`offcompile doctor`: measures this machine, and says in words what would help it."""

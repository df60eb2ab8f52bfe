"""`offcompile doctor`: measures this machine, and explains what would speed it up."""

"""The device code. Importing a module of this folder imports Triton."""

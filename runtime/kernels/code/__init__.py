"""What runs on the device. Importing a module of this folder imports Triton."""

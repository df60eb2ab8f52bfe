"""The parts of train_gpt.py: the model with its data, and one run of it."""

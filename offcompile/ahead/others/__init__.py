"""Answers beside the step itself: other budgets, found in processes beside this one."""

"""Answers beside the step itself, and processes beside this one to find them.

`budgets` takes a traced model with a plan and returns the step under other budgets; `processes`
computes an answer in a forked process, or here where none may be started.
"""

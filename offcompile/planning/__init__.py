"""Plans for one problem: verified, fitted to a budget, and put in an order independent of timing.

Input: a `Problem` and a `Machine`. Output: a plan with its certificate (`planner`), the smallest
machine that holds it (`fit_budget`), the program that is correct at any lane speeds (`order`,
`copy_lifetimes`), and the addresses that its tensors would get (`planned_layout`). Does not depend
on torch's graphs.
"""

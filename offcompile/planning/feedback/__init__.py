"""Measurements of steps that ran, and the corrections to costs, rates and ratios that follow.

In: measured steps, lane rates, densities of tensors. Out: factors and ratios for the next plan.
"""

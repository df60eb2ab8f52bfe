"""Measurements of executed steps, and the resulting corrections to costs, rates and ratios.

Input: measured steps, lane rates, densities of tensors. Output: factors and ratios for the next
plan.
"""

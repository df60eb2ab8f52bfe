"""Decisions into plans: the contract of policies, programs, copies and the builder (`schedule`).

In: a problem, a machine and decisions (what is away when, and how). Out: a plan that is legal by
construction. Everything here is pure and deterministic.
"""

"""The machine to plan for, and the user's options.

Input: options as given, hardware profiles and files, rates measured on this machine (and cached).
Output: checked `Options`, an `ir.Machine` with tiers, lanes and codecs, and the `Target`, which
says how much of a device a plan may use.
"""

"""The machine that is planned for, and the user's options.

In: options as given, profiles and files of hardware, rates measured on this machine (and cached).
Out: a checked `Options`, an `ir.Machine` with tiers, lanes and codecs, and the `Target` that says
how much of a device a plan may use.
"""

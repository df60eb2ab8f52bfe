"""The bound of one crowded moment, for problems too large for a linear program of the whole step.

In: a survey, and the moment at which most bytes want to be on the device. Out: the least time of
any plan, by the traffic that must cross before and after the moment (`cut`). The traffic depends on
recomputations (`chains`), updates on the host (`sides`) and the end of the step (`ending`); prices
of the lanes (`weights`) turn these choices into a sum. The time before the moment may also be that
of loads and the ops behind them (`leading`).
"""

"""Results of `pdray bench` as pictures and as one page: latency CDF, request timeline, goodput against rate.

    saved results ─► runs | sweeps ─► figures ─► PNG files | one HTML file that needs nothing else

Drawing needs matplotlib, the extra `bench`. Not here: anything that is measured.
"""

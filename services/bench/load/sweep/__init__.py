"""`pdray bench sweep`: the highest rate at which a server keeps an SLO.

    search ─ rate ─► probe: reference request, then an open-loop run ─ met or not ─► search … ─► result

The search is pure. Not here: several servers in turn; give each its own sweep, and compare their confirmations.
"""

"""Who is let in, when, and in which order: targets of a request, the router's queue, and what it can promise.

    arrival ─► SLO ─► plan ─► predicted times ─┬─ within the targets ─► WaitingQueue ─► room at the pair ─► sent
                                               └─ not ─► 503 with the numbers and Retry-After

Nobody waits where a pair has room. It keeps no tenant's key and no limit per minute: those belong to access.
"""

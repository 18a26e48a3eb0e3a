"""Replays a recorded arrival trace against the router's own policy, view and bookings, on a virtual clock.

    trace ─► plan (real) ─► simulated prefill worker ─► simulated link ─► simulated decode worker
                ▲                 │ real block pool                          │ real block pool
                └── loads, block events (after a delay), hand-off reports ◄──┘

Engine, network and clock are simulated; nothing waits. Not simulated: failures, preemption (an answer's blocks are
reserved with its prompt's), choices (`n`), tiers, and answers as prefixes of later prompts, since traces name none.
"""

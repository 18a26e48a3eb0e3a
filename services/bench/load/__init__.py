"""`pdray bench`: puts a known load on any OpenAI-compatible server and tells what it saw.

    workload + arrivals ─► jobs ─► drive (open or closed loop) ─► client ─► records ─► summary ─► show | compare

Latency counts from the scheduled send, so that a client that has to wait does not make an overloaded server look fine.
Tokens come from the server's usage, never from the number of chunks. What failed is never a success.

A sweep runs many of these to find the highest rate that meets an SLO. Not here: images.
"""

"""`pdray bench`: puts a known load on any OpenAI-compatible server and tells what it saw.

    workload + arrivals ─► jobs ─► drive (open or closed loop) ─► client ─► records ─► summary ─► report | compare

Latency counts from the scheduled send, so that a client that has to wait does not make an overloaded server look fine.
Tokens come from the server's usage, never from the number of chunks. What failed is never a success.

Not here: a search for the highest rate, plots, multi-turn, images, cancellation, keys of tenants.
"""

"""`pdray batch`: a file of requests in OpenAI's batch form, answered by a running server.

    INPUT.jsonl ─► all lines checked ─► those without an answer in OUT.jsonl ─► at most N at once ─► OUT.jsonl

Runs anywhere the server can be reached, and imports neither Ray nor torch. It keeps no state beside OUT.jsonl.
"""

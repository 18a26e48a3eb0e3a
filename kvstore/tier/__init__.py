"""Where KV blocks live beside the engine's own pool, behind one protocol: `kvstore.tier.base.Connector`.

A tier keeps copies of named blocks and gives them back. It chooses nothing: the engine asks, and computes what a tier
does not have.
"""

"""The metadata store that an application starts for itself where no Redis is given: one Valkey, hints only.

It listens on this machine's loopback. Workers on other machines do without it; a cluster is given ``redis.url``.
"""

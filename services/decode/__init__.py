"""The decode worker: owns the memory that prompts' KV is written into, verifies it, and generates.

In role `mixed` it also takes whole requests and computes their prompts itself. It never computes a prompt that was
handed to it.
"""

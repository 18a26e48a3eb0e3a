"""Everything kvstore raises.

HTTP and gRPC statuses are added once, by the map in ``services.protocol.errors``.
"""

from __future__ import annotations


class KVError(Exception):
    """Root of what kvstore raises."""

    retryable = False


class ConfigError(ValueError):
    """A configuration value that can never work; the message starts with its dotted path."""


class OutOfBlocks(KVError):
    """The pool cannot hold the sequence now; another worker, or a later step, may."""

    retryable = True


class NeverFits(KVError):
    """The sequence needs more blocks than the pool has; no wait will help here."""


class GeometryMismatch(KVError):
    """Two memories whose blocks cannot be exchanged; the message names both values."""


class TransferError(KVError):
    """A write did not arrive, or cannot be proven to have arrived."""

    retryable = True


class TransportUnavailable(KVError):
    """The transport cannot run on this machine; the message says what is missing and the way out."""


class IndexUnavailable(KVError):
    """The metadata store did not answer. Hints are missing, nothing else."""

    retryable = True

"""Everything kvstore raises.

HTTP and gRPC statuses are added once, by the map in ``services.protocol.errors``.
"""

from __future__ import annotations

from enum import StrEnum


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


class SubmitFailed(TransferError):
    """No write of a batch was started."""


class FailureKind(StrEnum):
    """At which stage a transfer failed; what workers count failures by."""

    CONNECT = "connect"  # a channel to a reader could not be opened
    SUBMIT = "submit"  # a write was not started, so nothing of it can land
    COMPLETION = "completion"  # a write was started and is not done; it may still land until its channel is closed
    CLOSE = "close"  # a channel was closed, and the reader did not confirm its end
    PROCESS = "process"  # the transfer process ended by itself
    EXTENT = "extent"  # an extent landed with bytes that are not its digest's
    PLAN = "plan"  # writer and reader do not fit together, or a message names what is not there


class TransportUnavailable(KVError):
    """The transport cannot run on this machine; the message says what is missing and the way out."""


class IndexUnavailable(KVError):
    """The metadata store did not answer. Hints are missing, nothing else."""

    retryable = True

"""What a native library prints to stderr becomes log lines at level DEBUG.

Mooncake complains on stderr about what is no fault (a segment that is not there yet, a peer that left). The process's
own log keeps the real stderr.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TextIO

log = logging.getLogger("pdray.transfer.native")


def divert_stderr() -> TextIO:
    """Turn descriptor 2 into a pipe that a daemon thread reads line by line; returns the stderr that was there before.

    Writing to the pipe never blocks, since the library may write while it holds the interpreter; what does not fit is
    lost.
    """
    original = os.fdopen(os.dup(2), "w", buffering=1)
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    os.dup2(theirs, 2)
    os.close(theirs)
    threading.Thread(target=_read, args=(ours,), name="native-stderr", daemon=True).start()
    return original


def _read(fd: int) -> None:
    with os.fdopen(fd, errors="replace") as lines:
        for line in lines:
            log.debug("%s", line.rstrip())

"""Log lines of pdray's processes: one format, on standard error, and never the text or the tokens of a request."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s [%(process)d] %(message)s"
_DATE = "%Y-%m-%dT%H:%M:%S"
_HANDLER = "pdray"
LEVELS = ("debug", "info", "warning", "error")


def setup_logging(level: str = "info", log_file: Path | None = None) -> None:
    """Send records of ``pdray.*`` to standard error, or to ``log_file``; those of other libraries from WARNING up.

    Called once by a process's main, and again without harm. Raises ValueError for a level that is not in ``LEVELS``.
    """
    if level not in LEVELS:
        raise ValueError(f"log level must be one of {LEVELS}, got {level!r}")
    formatter = logging.Formatter(FORMAT, _DATE)
    formatter.converter = time.gmtime
    handler: logging.Handler
    if log_file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(log_file, encoding="utf-8")
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == _HANDLER]:
        root.removeHandler(old)
        old.close()
    handler.set_name(_HANDLER)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("pdray").setLevel(level.upper())

"""What administrators did, and who tried to: one JSON object a line, never a key, a prompt or an answer.

    {"at": "2026-01-31T12:00:00.123+00:00", "key": "ops", "tenant": "ops", "action": "GET /v1/cluster", …}

Lines go to the logger ``pdray.audit``, and to ``access.audit_file`` where one is set, by a thread of its own.
"""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import queue
from datetime import UTC, datetime

from kvstore.errors import ConfigError

MAX_VALUE_CHARS = 200
MAX_WAITING = 10_000
"""Lines that wait for the disk; more are dropped, and the log keeps them."""

_log = logging.getLogger("pdray.audit")


class Audit:
    """`open` it once; `tell` works before that too, in the log alone."""

    def __init__(self) -> None:
        self._handler: logging.Handler | None = None
        self._listener: logging.handlers.QueueListener | None = None

    def open(self, path: str) -> None:
        """Raises ConfigError where the file cannot be written."""
        if not path:
            return
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
            file = logging.FileHandler(path, encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"access.audit_file: {path} cannot be written: {exc.strerror}") from None
        file.setFormatter(logging.Formatter("%(message)s"))
        lines: queue.Queue[logging.LogRecord] = queue.Queue(MAX_WAITING)
        self._handler = logging.handlers.QueueHandler(lines)
        self._listener = logging.handlers.QueueListener(lines, file)
        self._listener.start()
        _log.addHandler(self._handler)
        _log.setLevel(logging.INFO)

    def close(self) -> None:
        if self._listener is not None and self._handler is not None:
            _log.removeHandler(self._handler)
            self._listener.stop()
            for handler in self._listener.handlers:
                handler.close()
            self._listener = self._handler = None

    def tell(self, *, action: str, outcome: str, key: str = "", tenant: str = "", peer: str = "") -> None:
        """One line. ``action`` is a method and a path or an RPC's name, without what stood behind a question mark."""
        line = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "key": key, "tenant": tenant, "peer": peer}
        line |= {"action": action[:MAX_VALUE_CHARS], "outcome": outcome[:MAX_VALUE_CHARS]}
        _log.info(json.dumps(line))

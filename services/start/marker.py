"""A file that says "a worker serves here", for probes that can look at a container but not into it.

`<home>/run/serving-<pid>` exists while that process's worker serves. One that was killed leaves its file behind, so who
looks must also ask whether the process lives; see the probe in helm/pdray/templates/_pod.tpl.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from services.config import home

_log = logging.getLogger("pdray.start")
PREFIX = "serving-"


def set_marker(folder: Path | None = None) -> Path | None:
    """The file of this process, written; None where the folder cannot be written to, which hinders no worker."""
    path = (folder or home() / "run") / f"{PREFIX}{os.getpid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch()
    except OSError as exc:
        _log.warning("%s cannot be written (%s): a probe of this container will not see that it serves", path, exc)
        return None
    return path

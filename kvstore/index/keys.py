"""The keys of an index and, in a cluster, the slots they lie in."""

from __future__ import annotations

from urllib.parse import quote, unquote


class Keys:
    """Ids are percent-quoted. With ``is_tagged`` a worker's id is the hash tag of all its keys: one slot each."""

    def __init__(self, namespace: str, is_tagged: bool) -> None:
        self._prefix = f"pdray:{namespace}:"
        self._tag = "{%s}" if is_tagged else "%s"

    @property
    def workers(self) -> str:
        """The list of all workers."""
        return self._prefix + "workers"

    @property
    def prefixes(self) -> tuple[str, str]:
        """What a suffix is put behind: of the block set, and of the stream."""
        return self._prefix + "blocks:", self._prefix + "events:"

    def worker(self, worker_id: str) -> str:
        return self._prefix + "worker:" + self._tag % quote(worker_id, safe="")

    def listed(self, member: bytes) -> bytes:
        """The `worker` key of a member of the list, whatever bytes that is."""
        return self._prefix.encode() + b"worker:" + self._tag.encode() % member

    def suffix(self, worker_id: str, epoch: str) -> str:
        return f"{self._tag % quote(worker_id, safe='')}:{quote(epoch, safe='')}"

    def pair(self, worker_id: str, epoch: str) -> list[str]:
        """Block set and stream of one epoch."""
        suffix = self.suffix(worker_id, epoch)
        return [prefix + suffix for prefix in self.prefixes]

    def all_of(self, worker_id: str, epoch: str) -> list[str]:
        return [self.worker(worker_id), *self.pair(worker_id, epoch)]


def member_of(worker_id: str) -> str:
    """As the list of workers names it."""
    return quote(worker_id, safe="")


def worker_of(member: bytes) -> str:
    """Raises ValueError on what `member_of` never gives."""
    return unquote(member.decode(), errors="strict")

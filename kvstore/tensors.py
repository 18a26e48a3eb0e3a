"""The KV memory of one worker: a memfd that the engine and its transfer process both map.

Who creates it closes it; the other process attaches by the inherited descriptor. Pages come into being when they are
first touched, so memory that no sequence has reached costs nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

from kvstore.geometry import KVGeometry

if TYPE_CHECKING:  # the transfer process maps this memory and never loads torch
    import torch


class KVMemory:
    """One mapping of the memory."""

    def __init__(self, fd: int, geometry: KVGeometry) -> None:
        """Owns ``fd`` from here on. `create` and `attach` are the ways in."""
        self.fd = fd
        self.geometry = geometry
        self.num_bytes = geometry.total_bytes
        mapping = mmap.mmap(fd, self.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))  # of the first byte, in this process
        self.buffer = memoryview(mapping)
        self._mapping: mmap.mmap | None = mapping

    @classmethod
    def create(cls, geometry: KVGeometry) -> KVMemory:
        """New memory, all zero. The descriptor is not inherited unless it is passed on (``pass_fds``).

        Raises:
            OSError: the kernel refuses a file of this size.
        """
        fd = os.memfd_create("pdray-kv", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, geometry.total_bytes)
            return cls(fd, geometry)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, geometry: KVGeometry) -> KVMemory:
        """Map memory that another process created; takes over ``fd``.

        Raises:
            ValueError: the file's size is not that of the geometry.
        """
        size = os.fstat(fd).st_size
        if size != geometry.total_bytes:
            raise ValueError(f"KV memory has {size} bytes, its geometry needs {geometry.total_bytes}")
        return cls(fd, geometry)

    def layer(self, group: int, layer: int) -> torch.Tensor:
        """The blocks of one layer as a view: [num_blocks, 2, kv_heads, block_size, head_dim], K at 0 and V at 1."""
        import torch

        shape = self.geometry.groups[group]
        if not 0 <= layer < shape.num_layers:
            raise IndexError(f"layer {layer} of {shape.num_layers}")
        num_blocks = self.geometry.num_blocks[group]
        dtype: torch.dtype = getattr(torch, shape.dtype)
        if self._mapping is None:
            raise ValueError("the KV memory is closed")
        flat = torch.frombuffer(
            self._mapping,
            dtype=dtype,
            count=num_blocks * 2 * shape.num_kv_heads * shape.block_size * shape.head_dim,
            offset=self.geometry.offset(group, layer, 0),
        )
        return flat.view(num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy one block in all layers of its group."""
        for layer in range(self.geometry.groups[group].num_layers):
            self.block(group, layer, target)[:] = self.block(group, layer, source)

    def block(self, group: int, layer: int, block: int) -> memoryview:
        """The bytes of one block of one layer, writable."""
        num_layers, num_blocks = self.geometry.groups[group].num_layers, self.geometry.num_blocks[group]
        if not (0 <= layer < num_layers and 0 <= block < num_blocks):
            raise IndexError(f"layer {layer} of {num_layers}, block {block} of {num_blocks}")
        start = self.geometry.offset(group, layer, block)
        return self.buffer[start : start + self.geometry.groups[group].block_bytes]

    def close(self) -> None:
        """Close the descriptor and let go of the mapping, which is gone with the last tensor or view of it.

        It is never unmapped by force: a tensor does not keep Python from doing so, and would then point nowhere.
        """
        if self._mapping is None:
            return
        os.close(self.fd)
        self.fd = -1
        self.buffer.release()
        self._mapping = None

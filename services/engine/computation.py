"""What a step asks of a model, whichever way it is computed.

Two paths implement it: `services.engine.generic` (transformers' own modules over paged attention, any architecture) and
`services.engine.native.fused` (one call of native kernels, the Llama family).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from services.engine.batch import PagedMemory, Span


NO_SUMS: Mapping[int, torch.Tensor] = MappingProxyType({})
"""What nearly every step asks for."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What came out of a forward."""

    logits: torch.Tensor  # [rows wanted, vocab], in the host's memory
    sound: tuple[bool, ...]  # for each span: all its hidden states are finite


def fetch(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors in the host's memory: the one point of a step that waits for the device."""
    return [tensor.cpu() for tensor in tensors]


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host's tensor on the device, without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class ModelPath(Protocol):
    """Computes tokens of several sequences at once, on paged memory."""

    name: str
    hidden_size: int
    """Of the states that can be summed up; 0: none can."""

    def forward(
        self,
        memory: PagedMemory,
        spans: Sequence[Span],
        wanted: Sequence[tuple[int, int]],
        on_layer: Callable[[int], None] | None = None,
        sums: Mapping[int, torch.Tensor] = NO_SUMS,
    ) -> Forwarded:
        """K and V of all tokens go to the memory; one sequence's numbers never reach another's.

        Args:
            wanted: (index of a span, offset of a token in it) of each row of logits; may be empty.
            on_layer: called with each layer's index when its K and V are in the memory.
            sums: by index of a span, float32 [hidden_size] in the host's memory, to which the states of its tokens
                behind the last norm are added, once everything else has succeeded.
        """

"""Any architecture of transformers, computed by its own classes over paged attention: what faster paths must equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from services.engine.attention import AttentionBackend
from services.engine.batch import PagedMemory, Span, pack
from services.engine.computation import NO_SUMS, Forwarded, fetch, to_device


class GenericPath:
    """Implements `services.engine.computation.ModelPath`; the module calls `services.engine.attention.attend`."""

    def __init__(self, module: Any, backend: AttentionBackend) -> None:
        self.module = module
        self.backend = backend
        self.name = f"generic:{backend.name}"
        self.asked: dict[int, tuple[float, int]] = {}
        """Of each layer, what its attention was last called with: scaling, window."""
        head = module.get_output_embeddings()
        self.hidden_size = 0 if head is None else int(head.weight.shape[1])
        self._finite: torch.Tensor | None = None
        self._states: torch.Tensor | None = None  # of the forward under way, behind the last norm
        module.base_model.register_forward_hook(self._watch)

    def forward(
        self,
        memory: PagedMemory,
        spans: Sequence[Span],
        wanted: Sequence[tuple[int, int]],
        on_layer: Callable[[int], None] | None = None,
        sums: Mapping[int, torch.Tensor] = NO_SUMS,
    ) -> Forwarded:
        """See `ModelPath.forward`."""
        batch = pack(memory, self.backend, spans, on_layer)
        rows = torch.tensor([batch.starts[i] + offset for i, offset in wanted], dtype=torch.int64)
        with torch.inference_mode():
            output = self.module(
                input_ids=batch.input_ids,
                position_ids=batch.positions,
                use_cache=False,
                logits_to_keep=to_device(rows, batch.input_ids.device),
                kv_batch=batch,
            )
        self.asked = batch.asked
        assert self._finite is not None
        assert self._states is not None
        parts = [self._states[batch.starts[i] : batch.ends[i] + 1].float().sum(0) for i in sums]
        logits, finite, *added = fetch(output.logits[0], self._finite, *parts)
        self._finite = self._states = None
        for total, part in zip(sums.values(), added, strict=True):
            total += part
        each = finite.tolist()
        sound = tuple(all(each[a : b + 1]) for a, b in zip(batch.starts, batch.ends, strict=True))
        return Forwarded(logits, sound)

    def _watch(self, _module: Any, _args: Any, output: Any) -> None:
        self._states = output[0][0]
        self._finite = torch.isfinite(self._states.sum(-1))

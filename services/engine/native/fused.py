"""Decoders of the Llama family, computed by the native kernels: Llama, SmolLM, Qwen2, Qwen3, Mistral.

A transformers module is taken apart once: q, k, v become one matrix, gate and up another, all in the kernels' layout.
What such a module might do beyond this (other activations, biases elsewhere, scaled residuals) is refused with the
reason, and the generic path serves it. The loader compares both on a short text before it trusts this one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from services.engine.batch import PagedMemory, Span
from services.engine.computation import NO_SUMS, Forwarded
from services.engine.native.library import MAX_HEAD_DIM, PANEL, Kernels, LayerParts, ModelParts, OnLayer, StepParts

FAMILY = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class NotFused(ValueError):
    """The fused path does not compute this model; says what it lacks."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Tensors of one layer; kept alive for the kernels."""

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm_in: torch.Tensor
    norm_mid: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    window: int

    def parts(self) -> LayerParts:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "window"}
        return LayerParts(**{name: _address(tensor) for name, tensor in tensors.items()}, window=self.window)


class FusedPath:
    """Implements `services.engine.computation.ModelPath` for one model and dtype."""

    def __init__(
        self,
        kernels: Kernels,
        module: Any,
        asked: Mapping[int, tuple[float, int]],
        max_positions: int,
        num_threads: int,
    ) -> None:
        """Take a module apart; its tensors may be let go afterwards.

        Args:
            asked: of each layer, the scaling and window that the module calls attention with.
        Raises:
            NotFused: the kernels do not compute it.
        """
        config = module.config
        self.name = f"fused:{kernels.kind.name}"
        self.is_pinned = False
        """Threads stay on CPUs of their own; to be set before the first forward, by a process alone on its CPUs."""
        self._opened: tuple[PagedMemory, int, Any] | None = None
        self._kernels, self._num_threads = kernels, num_threads
        _check(module, asked)
        self._config = config
        weight = module.model.embed_tokens.weight.detach()
        self._dtype = weight.dtype
        self._embedding = weight.contiguous()
        self._head = kernels.pack(module.lm_head.weight.to(weight.dtype))
        self._norm = _single(module.model.norm.weight)
        self._layers = [_layer(kernels, layer, config, asked[i][1]) for i, layer in enumerate(module.model.layers)]
        self._scale = asked[0][0]
        self._cosine, self._sine = _angles(module, max_positions)
        self._head_dim = int(module.model.layers[0].self_attn.head_dim)
        self.hidden_size = int(config.hidden_size)

    def forward(
        self,
        memory: PagedMemory,
        spans: Sequence[Span],
        wanted: Sequence[tuple[int, int]],
        on_layer: Callable[[int], None] | None = None,
        sums: Mapping[int, torch.Tensor] = NO_SUMS,
    ) -> Forwarded:
        """See `ModelPath.forward`."""
        counts = np.array([len(span.token_ids) for span in spans], dtype=np.int32)
        firsts = np.array([span.start for span in spans], dtype=np.int32)
        rows = np.concatenate(([0], np.cumsum(counts)))
        ids = np.concatenate([np.asarray(span.token_ids, dtype=np.int32) for span in spans])
        tables = [np.asarray(span.block_ids, dtype=np.int32) for span in spans]
        shape = np.ascontiguousarray(np.stack([rows[:-1], counts, firsts], axis=1, dtype=np.int32))
        addresses = np.array([table.ctypes.data for table in tables], dtype=np.uint64)
        picked = np.array([rows[span] + offset for span, offset in wanted], dtype=np.int32)
        logits = torch.empty(len(wanted), self._config.vocab_size)
        finite = np.empty(len(ids), dtype=np.uint8)
        step = StepParts(
            tokens=len(ids),
            spans=len(spans),
            rows=len(wanted),
            ids=ids.ctypes.data,
            span=shape.ctypes.data,
            blocks=addresses.ctypes.data,
            wanted=picked.ctypes.data,
            logits=logits.data_ptr(),
            finite=finite.ctypes.data,
        )
        if on_layer is not None:
            step.on_layer = OnLayer(on_layer)
        if sums:
            pool = np.array([(rows[i], counts[i]) for i in sums], dtype=np.int32)
            added = torch.stack(list(sums.values()))
            step.pools, step.pool, step.sums = len(sums), pool.ctypes.data, added.data_ptr()
        if self._kernels.run(self._handle(memory), ctypes.byref(step)):
            raise MemoryError(f"no memory for the activations of {len(ids)} tokens")
        for i, total in enumerate(sums.values()):
            total.copy_(added[i])
        sound = np.logical_and.reduceat(finite, rows[:-1]) if len(spans) else finite
        return Forwarded(logits, tuple(bool(ok) for ok in sound))

    def held_bytes(self) -> int:
        """Activations and workspaces that the kernels hold now."""
        return self._kernels.held_bytes(self._opened[1]) if self._opened else 0

    def close(self) -> None:
        """Let the kernels' memory go; the next forward takes it anew."""
        if self._opened is not None:
            self._kernels.close(self._opened[1])
            self._opened = None

    def __del__(self) -> None:
        self.close()

    def _handle(self, memory: PagedMemory) -> int:
        if self._opened is not None and self._opened[0] is memory:
            return self._opened[1]
        self.close()
        rows = memory.token_rows
        if len(rows) != len(self._layers) or any(r.dtype != self._dtype for r in rows):
            raise ValueError("the KV memory is not this model's")
        layers = (LayerParts * len(rows))(*[layer.parts() for layer in self._layers])
        addresses = (ctypes.c_void_p * len(rows))(*[r.data_ptr() for r in rows])
        config = self._config
        parts = ModelParts(
            layers=len(rows),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=memory.num_kv_heads,
            head_dim=self._head_dim,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            block_size=memory.block_size,
            epsilon=config.rms_norm_eps,
            scale=self._scale,
            embedding=self._embedding.data_ptr(),
            head=self._head.data_ptr(),
            norm_out=self._norm.data_ptr(),
            cosine=self._cosine.data_ptr(),
            sine=self._sine.data_ptr(),
            layer=ctypes.addressof(layers),
            memory=ctypes.addressof(addresses),
        )
        handle = self._kernels.open(self._dtype.itemsize, ctypes.byref(parts), self._num_threads, self.is_pinned)
        self._opened = (memory, handle, (parts, layers, addresses))
        return handle


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().contiguous()


def _check(module: Any, asked: Mapping[int, tuple[float, int]]) -> None:
    """Raise NotFused unless the module is of the family and nothing in it goes beyond the kernels."""
    config, kind = module.config, type(module).__name__
    attention = module.model.layers[0].self_attn if kind in FAMILY else None
    reasons = [
        (kind not in FAMILY, f"{kind} is not of the Llama family"),
        (getattr(config, "hidden_act", "") != "silu", f"its activation is {getattr(config, 'hidden_act', None)}"),
        (module.lm_head.bias is not None if kind in FAMILY else False, "its output layer has a bias"),
        (config.hidden_size % PANEL != 0, f"hidden_size {config.hidden_size} is no multiple of {PANEL}"),
    ]
    if attention is not None:
        dim, inner = int(attention.head_dim), config.intermediate_size
        has_bias = any(
            part.bias is not None
            for layer in module.model.layers
            for part in (layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
        )
        reasons += [
            (dim % PANEL != 0, f"head_dim {dim} is no multiple of {PANEL}"),
            (dim > MAX_HEAD_DIM, f"head_dim {dim} is above {MAX_HEAD_DIM}"),
            (inner % PANEL != 0, f"intermediate_size {inner} is no multiple of {PANEL}"),
            (has_bias, "its output or MLP projections have biases"),
            (len({scaling for scaling, _ in asked.values()}) != 1, "its layers scale scores differently"),
            (module.lm_head.weight.dtype not in _DTYPES, f"its weights are {module.lm_head.weight.dtype}"),
        ]
    wrong = next((reason for applies, reason in reasons if applies), None)
    if wrong:
        raise NotFused(wrong)


def _layer(kernels: Kernels, layer: Any, config: Any, window: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = [part.bias for part in parts]
    inner = config.intermediate_size
    # a panel holds 16 gates and the 16 rises that they multiply
    order = torch.arange(2 * inner).view(2, inner // 16, 16).transpose(0, 1).reshape(-1)
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    return _Layer(
        qkv=kernels.pack(torch.cat([part.weight.detach() for part in parts])),
        out=kernels.pack(attention.o_proj.weight),
        gate_up=kernels.pack(torch.cat([mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()]), order),
        down=kernels.pack(mlp.down_proj.weight),
        norm_in=_single(layer.input_layernorm.weight),
        norm_mid=_single(layer.post_attention_layernorm.weight),
        qkv_bias=None if biases[0] is None else torch.cat([_single(bias) for bias in biases]),
        query_norm=None if norms[0] is None else _single(norms[0].weight),
        key_norm=None if norms[1] is None else _single(norms[1].weight),
        window=window,
    )


def _angles(module: Any, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of each position and half head dimension, rounded to the model's dtype as transformers does it."""
    positions = torch.arange(max_positions)[None]
    like = torch.zeros(1, dtype=module.lm_head.weight.dtype)
    with torch.inference_mode():
        cosine, sine = module.model.rotary_emb(like, positions)
    half = cosine.shape[-1] // 2
    if half * 2 != int(module.model.layers[0].self_attn.head_dim):
        raise NotFused(f"it rotates {half * 2} dimensions of each head, not all")
    return _single(cosine[0, :, :half]), _single(sine[0, :, :half])

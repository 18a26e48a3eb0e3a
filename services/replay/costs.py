"""What computing and moving KV costs a simulated worker, in milliseconds: pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """One kind of worker. A token's attention costs in proportion to the tokens before it."""

    prefill_token_ms: float  # of computing one prompt token, without attention
    attention_ms: float  # of one prompt token for each token before it
    prefill_step_ms: float  # least duration of a step that computes prompts
    chunk_tokens: int  # prompt tokens of one step
    decode_step_ms: float  # of a step without sequences: the weights are read
    decode_sequence_ms: float  # more for each sequence
    decode_context_ms: float  # more for each token of their contexts
    token_bytes: int  # KV of a token over all layers
    num_layers: int
    cache_tokens: int  # KV that a worker holds
    link_bytes_per_s: float  # from one worker to another
    transfer_setup_ms: float  # of a hand-off or a pull, beside its bytes

    def chunk_ms(self, start: int, tokens: int) -> float:
        """Part of one prompt in a step: ``tokens`` that follow ``start`` others."""
        return tokens * (self.prefill_token_ms + self.attention_ms * (start + (tokens - 1) / 2))

    def step_ms(self, chunks_ms: float) -> float:
        """A prefill step whose chunks take so long."""
        return max(self.prefill_step_ms, chunks_ms)

    def decode_ms(self, sequences: int, context_tokens: float) -> float:
        """One decode step."""
        return self.decode_step_ms + sequences * self.decode_sequence_ms + context_tokens * self.decode_context_ms

    def wire_ms(self, tokens: int) -> float:
        """KV of so many tokens over one link."""
        return 1000 * tokens * self.token_bytes / self.link_bytes_per_s


LLAMA_70B = CostModel(
    prefill_token_ms=0.0707,
    attention_ms=1.32e-6,
    prefill_step_ms=20.0,
    chunk_tokens=8192,
    decode_step_ms=18.0,
    decode_sequence_ms=0.03,
    decode_context_ms=3.5e-5,
    token_bytes=327_680,
    num_layers=80,
    cache_tokens=450_000,
    link_bytes_per_s=25e9,
    transfer_setup_ms=5.0,
)
"""Llama 3.1 70B in bf16 on four H100 SXM (tensor parallel 4), from data sheets and shapes; not measured.

70.6e9 weights cost 141 GFLOP a token and attention 2 × 2 × 80 layers × 8192 = 2.62 MFLOP for each token before it;
half of 4 × 989 TFLOPS makes 0.0707 ms and 1.32e-6 ms. A decode step reads 141 GB of weights and 328 kB of KV for each
token of context at 70 % of 4 × 3.35 TB/s: 15 ms and 3.5e-5 ms, with 3 ms for 160 all-reduces. 320 GB hold the weights,
30 GB of activations and 450 000 tokens of KV. A link has 200 Gbit/s.
"""
TINY_CPU = CostModel(
    prefill_token_ms=0.5,
    attention_ms=5e-5,
    prefill_step_ms=15.0,
    chunk_tokens=256,
    decode_step_ms=15.0,
    decode_sequence_ms=1.5,
    decode_context_ms=5e-4,
    token_bytes=23_040,
    num_layers=30,
    cache_tokens=65_536,
    link_bytes_per_s=1e9,
    transfer_setup_ms=5.0,
)
"""SmolLM2-135M in bf16 on two CPU cores: round figures of the order that this project's benchmarks show."""

COST_MODELS: Mapping[str, CostModel] = {"llama-70b": LLAMA_70B, "smollm2-135m-cpu": TINY_CPU}

"""ModelInfo: what the rest of the engine may know of a model."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.kernels import kv_layout


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Shapes of one loaded model.

    Attributes:
        vocab_size: width of the logits; may be larger than the tokenizer's vocabulary (padding rows).
        max_position: positions that the model supports; a context holds at most so many tokens.
        dtype: "float32" or "bfloat16", of activations and KV, and of weights that are not quantised.
        name: as the user named the model.
        weights: what the linear layers run on, such as "bfloat16" or "q4_1+q8_0" (layers + head).
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int
    dtype: str
    name: str
    weights: str = ""

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of K and V of all layers for one block of `block_size` tokens."""
        token = self.num_kv_heads * kv_layout.head_bytes(self.head_dim, self.dtype)
        return 2 * self.num_layers * block_size * token

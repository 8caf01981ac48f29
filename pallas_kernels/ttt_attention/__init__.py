"""Attention of a whole sequence during training: causal within documents, plus each slot's own later keys."""

from pallas_kernels.ttt_attention.api import ttt_attention

__all__ = ["ttt_attention"]

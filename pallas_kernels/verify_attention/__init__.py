"""Attention of a few new tokens to a long cache and to each other."""

from pallas_kernels.verify_attention.api import verify_attention

__all__ = ["verify_attention"]

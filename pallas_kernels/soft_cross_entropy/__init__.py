"""Distillation losses over a draft vocabulary, without any [tokens, vocabulary] array."""

from pallas_kernels.soft_cross_entropy.api import Losses, soft_cross_entropy
from pallas_kernels.soft_cross_entropy.reference import LOSSES

__all__ = ["LOSSES", "Losses", "soft_cross_entropy"]

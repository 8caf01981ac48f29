"""Drafters. A new variant is one file with the methods of `Eagle3Drafter`, and one line here."""

from eagle_jax.drafter.eagle3 import Eagle3Drafter

DRAFTERS = {"eagle3": Eagle3Drafter}

"""Prefixes of the names of a half's inputs: they tell what an input is."""

from __future__ import annotations

#: An input of a backward: the gradient of a result of its forward.
TANGENT_INPUT = "tangents_"

#: A full parameter that its unit keeps gathered (:mod:`graphshard.backend.half`).
GATHERED_INPUT = "gathered_"

#: A gradient of earlier micro-batches: not reduced, or reduced over the shard axis only.
WAITING_INPUTS = ("unreduced_", "partial_")

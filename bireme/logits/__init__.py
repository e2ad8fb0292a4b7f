"""Choosing tokens: one registry of logits processors and the sampler that engines use. Torch comes lazily."""

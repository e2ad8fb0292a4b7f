"""Choosing tokens: a registry of logits processors, and the sampler that engines use. Imports no torch itself."""

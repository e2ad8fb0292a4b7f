"""Weights stored in few bits: which tensors of a checkpoint make which plain tensor, and how, or how they stay."""

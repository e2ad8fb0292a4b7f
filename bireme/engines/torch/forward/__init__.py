"""Runs a step: from the plan to logits or tokens, on modules, fused kernels, packed weights or graphs of these."""

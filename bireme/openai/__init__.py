"""The OpenAI-compatible frontend: a process of its own, on this machine or another."""

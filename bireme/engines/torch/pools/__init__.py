"""The memory of KV: the device's pools, and copies of their rows and blocks."""

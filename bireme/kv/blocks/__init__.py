"""The engine's own account of its KV blocks: allocation, reuse, tiers, hashes, events of what changed."""

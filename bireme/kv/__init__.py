"""KV blocks: hashing, events, reuse, routing by overlap and transfer between engines."""

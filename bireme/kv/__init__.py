"""KV blocks: allocation and reuse, hashes, events, placement of requests, transfer between engines."""

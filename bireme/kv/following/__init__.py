"""What workers hold, by their KV events: the feed of a router's process and its index."""

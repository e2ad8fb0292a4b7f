"""The memory service: a process that keeps an engine's weights, so that the next one maps them."""

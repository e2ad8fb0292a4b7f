"""An engine's KV events and load, on their way to routers."""

"""Files, and the batches that run what is in them."""

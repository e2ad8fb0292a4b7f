"""Embeddings of texts: the engine of an `embedding` worker."""

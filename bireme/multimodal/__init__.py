"""Images on their way to embeddings."""

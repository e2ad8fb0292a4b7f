"""Pictures: the vision tower, its requests, and embeddings for the sequences of any engine."""

"""GGUF files: their heads, and what of a model folder stands in them. Read without torch and transformers."""

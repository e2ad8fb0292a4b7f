"""The engine that drives TensorRT-LLM; the only package that imports it."""

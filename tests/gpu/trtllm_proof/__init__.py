"""What works here with the TensorRT-LLM that is installed: a row a feature, through bireme's own engine."""

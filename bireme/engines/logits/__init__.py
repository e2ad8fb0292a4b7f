"""The child process of the logits_processor model: processors are torch code, and a stub has no torch."""

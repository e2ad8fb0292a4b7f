"""One file a Triton model, of the same name; knows neither Triton nor torch."""

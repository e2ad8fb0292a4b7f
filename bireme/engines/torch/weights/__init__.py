"""What a model's folder gives: its configuration, limits and weights."""

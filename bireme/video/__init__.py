"""Videos and pictures apart from any engine: request rules, encoding, results on disk."""

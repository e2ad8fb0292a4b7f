"""Videos and pictures, without any engine: request rules, encoding, results on disk."""

"""How the workers of one deployment find each other, and the key that they share."""

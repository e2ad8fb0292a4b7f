"""How the workers of a deployment find each other, and their key."""

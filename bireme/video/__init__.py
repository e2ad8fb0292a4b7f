"""Video generation."""

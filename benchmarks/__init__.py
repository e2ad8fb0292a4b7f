"""Programs that measure what the project claims, side by side with its alternatives."""

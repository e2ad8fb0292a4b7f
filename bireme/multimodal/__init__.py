"""Pictures of a request: where they may come from, how they are decoded, what names their content."""

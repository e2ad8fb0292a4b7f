"""Pictures of a request: where they may come from, how they are decoded and encoded, what names their content."""

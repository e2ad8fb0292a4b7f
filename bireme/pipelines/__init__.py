"""One file a Triton pipeline, of the same name; calls workers through an interface only."""

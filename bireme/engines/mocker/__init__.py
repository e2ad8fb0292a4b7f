"""The mocker: an engine with a timing model instead of a model."""

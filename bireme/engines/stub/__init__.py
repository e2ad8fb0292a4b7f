"""The stub's side of an engine: its client, and the supervisor that starts and watches the engine process."""

"""Engines: what each does, the process in which one runs, and the client that starts and watches that process."""

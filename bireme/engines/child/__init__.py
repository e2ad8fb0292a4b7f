"""The engine process: its loop, its sockets, and what it accepts."""

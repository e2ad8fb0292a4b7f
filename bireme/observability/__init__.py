"""What an entry tells of its requests beside metrics: who reads finished traces, and where they go."""

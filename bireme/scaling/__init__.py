"""The planner at work on a deployment that runs: what it sees, what acts for it, and what it tells."""

"""How many workers of each stage there should be: pure decisions, from what was observed."""

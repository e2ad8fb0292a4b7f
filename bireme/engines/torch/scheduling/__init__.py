"""Requests: from admission to their end, what each step works on, and what becomes of its tokens."""

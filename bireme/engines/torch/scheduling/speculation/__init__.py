"""Speculative decoding: drafts, how long they are, and the steps that verify them."""

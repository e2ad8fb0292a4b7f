"""Chats, completions and tokenization."""

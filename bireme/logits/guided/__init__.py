"""Guided decoding: grammars compiled for a vocabulary, and one sequence's way through its grammar.

    compiler.py     compiles, in processes that can be killed (compile_client.py, compile_process.py)
    guidance.py     which tokens a sequence may take next; triggered.py the same, from a token on
    filling.py      the masks of many sequences, on several threads
    schema.py       a JSON schema as xgrammar enforces it; other files hold its parts

xgrammar is imported on a thread of the compiler, never on the engine's.
"""

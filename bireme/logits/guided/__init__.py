"""Guided decoding: grammars compiled for a vocabulary, and one sequence's way through its grammar.

    compiler.py         cache and threads; compiles in processes that can be killed
    compile_process.py  such a process; compile_client.py is its parent's end
    guidance.py         which tokens a sequence may take next
    triggered.py        the same, from a token on
    mask.py             packed masks on logits
    schema.py           a JSON schema as xgrammar enforces it: places and their alternatives
    containers.py       its arrays and objects
    scalars.py          its numbers and texts; patterns.py writes the patterns, automaton.py joins several
    instance.py         whether a value satisfies a schema; references.py finds what `$ref` names
    keywords.py         what keywords may hold
    vocabulary.py       a tokenizer's tokens as bytes

xgrammar is imported with the first guide, on a thread of the compiler, never on the engine's.
"""

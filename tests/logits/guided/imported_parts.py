"""What the process that compiles grammars imports, in one whose forks are to have it (tests/warm_children.py)."""

import sys

from bireme.logits.guided.compile_process import import_lightly

import_lightly()
del sys.modules["xgrammar"]  # a package without a spec: each fork makes it, and finds its parts imported

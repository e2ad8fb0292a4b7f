"""Calls the compiled function of a folder; says what it returns and how often it was compiled."""

import logging
import sys

sys.dont_write_bytecode = True  # a file that changes within a second would be read as it was
sys.path[0] = sys.argv[1]
logging.basicConfig(level="INFO")

from outer_kernels import outer  # noqa: E402

print(outer(1), len(outer.stats.cache_misses))

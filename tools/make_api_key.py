"""Make an API key for the OpenAI frontend: the key on stderr, its entry for the key file on stdout.

    python tools/make_api_key.py alice >> keys.yaml      # after a first line `keys:`

The file holds only the key's hash; limits may be added to the entry (docs/openai.md).
"""

from __future__ import annotations

import argparse
import hashlib
import secrets
import sys

_PREFIX = "br-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="whose key it is: for logs and metrics")
    name = parser.parse_args().name
    key = _PREFIX + secrets.token_urlsafe(32)
    print(f"key, shown this once: {key}", file=sys.stderr)
    print(f"  - name: {name}\n    sha256: {hashlib.sha256(key.encode()).hexdigest()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Values of a model's arguments as JSON text."""

from __future__ import annotations

import json
import re
from typing import Any

SURROGATE = re.compile(r"[\ud800-\udfff]")


def json_text(value: Any) -> str:
    """Return JSON that UTF-8 can carry: surrogates are escaped, so that a reader joins the halves of a character.

    Raises ValueError for a number that is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return SURROGATE.sub(lambda half: f"\\u{ord(half.group()):04x}", text)

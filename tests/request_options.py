from __future__ import annotations

from typing import Any

from bireme.serving_options import ServingOptions


def with_options(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a request's fields, with those that are options as its `options`."""
    options = {name: fields.pop(name) for name in list(fields) if name in ServingOptions.__struct_fields__}
    return {**fields, "options": ServingOptions(**options)} if options else fields

"""A running OpenAI endpoint, as a benchmark sees it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Endpoint:
    name: str
    address: str  # host:port
    model: str
    processes: Mapping[str, int]  # role -> pid

    def probe(self, max_tokens: int) -> list[dict[str, Any]]:
        """Return the chunks of one streamed answer. Raises OSError, or ValueError when it is not one."""
        connection = http.client.HTTPConnection(self.address, timeout=30)
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": "two banks of oars"}],
            "max_tokens": max_tokens,
            "stream": True,
        }
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        if reply.status != 200 or not text.rstrip().endswith("data: [DONE]"):
            raise ValueError(f"{self.name}: status {reply.status}: {text[:300]}")
        return [json.loads(event[6:]) for event in text.split("\n\n") if event.startswith("data: {")]

    def num_content_chunks(self, max_tokens: int) -> int:
        """Return how many chunks with text an answer of so many tokens has."""
        chunks = self.probe(max_tokens)
        return sum(bool(chunk["choices"] and chunk["choices"][0]["delta"].get("content")) for chunk in chunks)

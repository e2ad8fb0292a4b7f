"""A worker's record as it lies in a shared store: JSON with the proof that a process of this deployment wrote it.

    {"mac":"<hex HMAC-SHA256 of the rest, by the deployment's key>", <the record's own fields>}

The proof covers the bytes, so a reader needs to know none of the fields; one that is older than proofs passes it by.
"""

from __future__ import annotations

import hmac

import msgspec

from bireme.discovery.run import WorkerRecord

_PURPOSE = b"bireme worker record:"
_START, _END = b'{"mac":"', b'",'
_DIGITS = 64


def seal_record(record: WorkerRecord, key: bytes) -> bytes:
    body = msgspec.json.encode(record)
    return _START + _mac(body, key) + _END + body[1:]


def open_record(blob: bytes, key: bytes) -> tuple[WorkerRecord, str]:
    """Return the record, and why it must not be trusted: "" where it is proven.

    Raises ValueError for what is no record.
    """
    try:
        record = msgspec.json.decode(blob, type=WorkerRecord)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error
    start = len(_START) + _DIGITS
    if not blob.startswith(_START) or blob[start : start + len(_END)] != _END:
        return (
            record,
            "its record is not signed; its server runs an older version, or nobody of this deployment wrote it",
        )
    if not hmac.compare_digest(blob[len(_START) : start], _mac(b"{" + blob[start + len(_END) :], key)):
        return record, "its record is signed with another deployment key; give all servers and frontends one BIREME_KEY"
    return record, ""


def _mac(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, _PURPOSE + body, "sha256").hex().encode()

"""Sends a share of the requests to another launch, once their clients have their answers, and compares.

    begin: what the client is sent is kept, too                                     on the loop
    end:   the request waits for one of _NUM_THREADS, or is dropped and counted     on the loop
    copy, comparison, the report in the run folder                                  on a thread

Nothing here makes a client wait. Where no operator has asked for copies (`POST /mirror`), nothing here runs.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bireme.discovery import live_settings, mirror_reports
from bireme.discovery.live_settings import MirrorSettings
from bireme.discovery.mirror_reports import Example, MirrorReport, Outcome
from bireme.metrics import Registry
from bireme.openai.http.call import Call
from bireme.openai.mirror.answers import MIRRORED, Said, difference, is_event, read_answer
from bireme.openai.mirror.copies import MARK, MAX_ANSWER_BYTES, Copied, CopyFailedError, CopySender, copy_of

_NUM_THREADS = 8
_MAX_HELD, _MAX_HELD_BYTES = 256, 64 << 20  # requests whose copies have not ended, and their bodies and answers
_LEAST_LIMIT_S, _LIMIT_FACTOR = 30.0, 5.0  # for a copy, and times the client's own answer
_OK, _SERVER_ERROR = 200, 500
logger = logging.getLogger("bireme.openai")


class Original:
    """A request that is to be copied, and what its client is sent."""

    def __init__(self, call: Call, data: bytes, settings: MirrorSettings) -> None:
        self.path, self.request_id, self.data, self.settings = call.path, call.request_id.decode(), data, settings
        self.arrived_at = call.arrived_at
        self.answer = bytearray()
        self.is_too_long = False
        self.status = 0
        self.first_event_s = self.seconds = 0.0

    def take(self, data: bytes) -> None:
        """Keep a part of the answer."""
        if not self.first_event_s and is_event(data):
            self.first_event_s = time.monotonic() - self.arrived_at
        if len(self.answer) + len(data) > MAX_ANSWER_BYTES:
            self.is_too_long = True
            self.answer.clear()
        elif not self.is_too_long:
            self.answer += data

    @property
    def num_bytes(self) -> int:
        return len(self.data) + len(self.answer)


class Mirror:
    """`begin` and `end` on the loop; `close` once."""

    def __init__(self, metrics: Registry, run_dir: Path | None) -> None:
        """`run_dir`: of the launch; None: no operator reaches this process."""
        self._metrics, self._run_dir = metrics, run_dir
        self._threads: ThreadPoolExecutor | None = None
        self._sender = CopySender()
        self._lock = threading.Lock()
        self._report = MirrorReport(run="")
        self._num_held = self._num_bytes = 0

    def begin(self, call: Call, data: bytes) -> None:
        """Once there is the body."""
        settings = live_settings.current().mirror
        if settings is None or self._run_dir is None or call.path not in MIRRORED or call.header(MARK.encode()):
            return
        if random.random() >= settings.share:
            return
        if self._num_held >= _MAX_HELD or self._num_bytes > _MAX_HELD_BYTES:
            self._note(settings, "dropped")
            return
        with self._lock:
            self._num_held += 1
        call.original = original = Original(call, data, settings)
        call.tap(original.take)

    def end(self, call: Call) -> None:
        """Once the client has its answer, or has left."""
        original: Original = call.original
        original.status, original.seconds = call.status, time.monotonic() - original.arrived_at
        is_accepted = original.status == _OK or original.status >= _SERVER_ERROR
        if call.is_canary or not is_accepted or original.is_too_long or not self._is_wanted(original):
            with self._lock:
                self._num_held -= 1
            self._note(original.settings, "left_out")
            return
        with self._lock:
            self._num_bytes += original.num_bytes
        self._threads = self._threads or ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="mirror")
        self._threads.submit(self._run, original)

    def close(self) -> None:
        """What is on its way is given up."""
        self._sender.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _is_wanted(self, original: Original) -> bool:
        """An operator may have ended the comparison meanwhile."""
        settings = live_settings.current().mirror
        return settings is not None and settings.run == original.settings.run

    def _run(self, original: Original) -> None:
        try:
            if self._is_wanted(original):
                self._copy(original)
        except Exception:
            logger.exception("mirror_failed request_id=%s", original.request_id)
            self._tell(original, "failed", "the comparison itself failed; this launch's log says why")
        finally:
            with self._lock:
                self._num_held -= 1
                self._num_bytes -= original.num_bytes
            self._write()

    def _copy(self, original: Original) -> None:
        copy = copy_of(original.path, original.request_id, original.data, original.settings)
        if copy is None:
            self._note(original.settings, "left_out")
            return
        try:
            copied = self._sender.send(copy, original.settings, max(_LEAST_LIMIT_S, _LIMIT_FACTOR * original.seconds))
        except CopyFailedError as error:
            self._note_statuses(original, "none")
            self._tell(original, "failed", str(error))
            return
        self._note_statuses(original, str(copied.status))
        old, new = (
            _said(original.path, original.status, original.answer),
            _said(original.path, copied.status, copied.body),
        )
        if old.error:
            self._tell(original, "old_failed", f"the client's answer failed: {old.error}")
        elif new.error:
            self._tell(original, "failed", new.error)
        else:
            self._note_times(original, copied, copy.is_stream)
            if not copy.must_be_same:
                self._note(original.settings, "sampled")
            elif reason := difference(old, new):
                self._tell(original, "different", reason)
            else:
                self._note(original.settings, "same")

    def _note_times(self, original: Original, copied: Copied, is_stream: bool) -> None:
        with self._lock:
            report = self._of(original.settings)
            report.latency.add(original.seconds, copied.seconds)
            if is_stream:
                report.ttft.add(original.first_event_s, copied.first_s)
        if is_stream:
            self._metrics.observe("bireme_mirror_first_token_seconds", original.first_event_s, "old")
            self._metrics.observe("bireme_mirror_first_token_seconds", copied.first_s, "new")

    def _note_statuses(self, original: Original, copied: str) -> None:
        with self._lock:
            report = self._of(original.settings)
            report.note_status("old", str(original.status))
            report.note_status("new", copied)

    def _tell(self, original: Original, outcome: Outcome, reason: str) -> None:
        example = Example(original.request_id, original.path, reason)
        logger.warning("mirror_%s request_id=%s path=%s reason=%s", outcome, example.request_id, example.path, reason)
        self._note(original.settings, outcome, example)

    def _note(self, settings: MirrorSettings, outcome: Outcome, example: Example | None = None) -> None:
        self._metrics.add("bireme_mirror_copies_total", 1, outcome)
        with self._lock:
            report = self._of(settings)
            report.count(outcome)
            if example is not None:
                report.note_example(example)

    def _of(self, settings: MirrorSettings) -> MirrorReport:
        """Return the comparison's report; the caller holds the lock."""
        if self._report.run != settings.run:
            self._report = MirrorReport(run=settings.run)
        return self._report

    def _write(self) -> None:
        assert self._run_dir is not None
        try:
            with self._lock:
                mirror_reports.write(self._run_dir, self._report)
        except OSError as error:  # the next one tries again
            logger.warning("mirror_report_unwritten error=%s", error)


def _said(path: str, status: int, body: bytes | bytearray) -> Said:
    if status != _OK:
        return Said(error=f"HTTP status {status}")
    return read_answer(path, bytes(body))

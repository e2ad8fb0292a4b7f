"""SIGTERM, SIGINT and SIGHUP, handled on a thread of their own.

A Python handler is no place to act on them. It interrupts the main thread anywhere, also within the lock that it needs
itself: `threading.Event.set` in a handler can deadlock with the `wait` that it interrupts. And it does not run at all
while the main thread blocks in a call that began just as the signal came. But the C level always writes the signal's
number to the wakeup descriptor (`signal.set_wakeup_fd`); a thread waits there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
logger = logging.getLogger("bireme.signals")


def on_stop_signal(handle: Callable[[int], None]) -> contextlib.ExitStack:
    """Call `handle` with the number of each of these signals from now on; on a thread, so it may take locks.

    SIGHUP stays ignored where it is already, as with nohup. Only the main thread may call this. Closing the result
    restores the former handling; without that it lasts as long as the process.
    """
    undo = contextlib.ExitStack()
    reads, writes = os.pipe()
    os.set_blocking(writes, False)  # as set_wakeup_fd wants it
    threading.Thread(target=_listen, args=(reads, handle), name="stop-signals", daemon=True).start()
    undo.callback(os.close, writes)  # ends the thread
    undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(writes, warn_on_full_buffer=False))
    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue
        undo.callback(signal.signal, number, signal.signal(number, lambda *_: None))
    return undo


def _listen(reads: int, handle: Callable[[int], None]) -> None:
    for number in _numbers(reads):
        if number not in STOP_SIGNALS:  # for another handler
            continue
        try:
            handle(number)
        except Exception:  # later signals must still be handled
            logger.exception("stop_signal_failed number=%d", number)


def _numbers(reads: int) -> Iterator[int]:
    try:
        while numbers := os.read(reads, 64):
            yield from numbers
    finally:
        os.close(reads)

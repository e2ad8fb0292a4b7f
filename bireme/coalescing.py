"""How long a token may wait, so that several share a message: the tunable figures.

docs/architecture.md says where each of them applies and why. They are the best found on two cores.
"""

from __future__ import annotations

# The engine's IO thread, between sends that follow each other in less than twice this: steps share a message.
ENGINE_PAUSE_S = 0.0005
# A sender of a stub pauses after a turn of that many streams, for a multiple of the turn's time.
BUSY_TURN, PAUSE_PER_TURN, LONGEST_PAUSE_S = 24, 1.0, 0.02
# That many requests at once are a burst: they start in portions with pauses between, and senders pause after any turn.
BURST, BURST_PAUSE_S, SENDER_BURST_PAUSE_S = 2, 0.008, 0.016
# Tokens of an unread delta; more than these show in the size of the stream's buffer.
MAX_GROWTH = 64
# The frontend's pause between flushes, as a multiple of the time that the last one took.
FLUSH_PAUSE = 1.0

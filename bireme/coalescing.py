"""How long a token may wait, so that several share a message: the figures that one may want to set.

docs/architecture.md says where each of them holds and why. They are the best that was found on two cores.
"""

from __future__ import annotations

# The engine's IO thread, between sends that follow each other in less than twice this: steps share a message.
ENGINE_REST_S = 0.0005
# A sender of a stub rests after a turn of so many streams, for a multiple of the time that the turn took.
BUSY_TURN, REST, LONGEST_REST_S = 24, 1.0, 0.02
# So many requests at once are a burst: they start in portions with pauses between, and senders rest after any turn.
BURST, BURST_PAUSE_S, BURST_REST_S = 2, 0.008, 0.016
# Tokens of a delta that nobody has looked at; what is beyond that shows in the size of the stream's buffer.
MAX_GROWTH = 64
# The frontend's pause between flushes, as a multiple of the time that the last one took.
FLUSH_PAUSE = 1.0

"""Changes of what workers hold, in columns: the form between event_reading.py and the index."""

STORE, REMOVE, CLEAR = range(3)  # kinds of changes
KIND, TIER, FIRST, END, SLOT = range(5)  # columns of changes
IS_READ, RANK, CHANGES_END, HASHES_END = range(4)  # columns of batches

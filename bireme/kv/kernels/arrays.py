"""Types of the arrays that routing and the index work on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]  # public hashes of KV blocks
Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

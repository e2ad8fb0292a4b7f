"""What the pictures of one request may still take: encoded bytes, counted as they arrive, and pixels."""

from __future__ import annotations

import threading

from bireme.config import MediaLimits
from bireme.errors import RequestError


class Budget:
    """One a request. Bytes are counted on the loop that loads its pictures, pixels by threads that decode them."""

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._left = limits.max_request_bytes
        self._num_pixels = 0
        self._lock = threading.Lock()

    def picture(self) -> PictureBudget:
        return PictureBudget(self, self._limits.max_image_bytes)

    def take(self, num_bytes: int) -> None:
        """Raises RequestError when the request as a whole is too large."""
        self._left -= num_bytes
        if self._left < 0:
            limit = self._limits.max_request_bytes
            raise RequestError(f"the request's pictures have more than {limit} bytes (media.max_request_bytes)")

    def take_pixels(self, num_pixels: int) -> None:
        """Raises RequestError at the first picture too many."""
        with self._lock:
            self._num_pixels += num_pixels
            total, limit = self._num_pixels, self._limits.max_request_pixels
        if total > limit:
            raise RequestError(
                f"the request's pictures have {total} pixels so far; at most {limit} in all (media.max_request_pixels),"
                " send fewer or smaller ones"
            )


class PictureBudget:
    """One picture's part."""

    def __init__(self, whole: Budget, limit: int) -> None:
        self._whole = whole
        self._limit = limit
        self._num_bytes = 0

    @property
    def limit(self) -> int:
        return self._limit

    def check(self, num_bytes: int) -> None:
        """Raise RequestError when a picture of so many bytes would be too large; counts nothing."""
        if num_bytes > self._limit:
            raise self._too_large(f"{num_bytes} bytes")

    def take(self, num_bytes: int) -> None:
        """Count bytes that have arrived. Raises RequestError at the first one too many."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._limit:
            raise self._too_large("more bytes than allowed")
        self._whole.take(num_bytes)

    def _too_large(self, size: str) -> RequestError:
        return RequestError(f"{size}; at most {self._limit} (media.max_image_bytes), send a smaller picture")

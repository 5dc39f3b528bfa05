"""Size and number of an upload's parallel parts, by the measured rate of the link.

    in flight = rate · REQUEST_S / 2       from one part of 5 MiB (S3's least) to 8 parts of 32 MiB
    parts     = 8 at a time, each in flight / 8; below 40 MiB in flight fewer parts, of 5 MiB

The bytes that are sent at the same time are "in flight".  A request has a time limit, and all parts in flight share the
link.  With 256 MiB in flight and 300 s per request, no upload would end in time on a link slower than 7.2 Mbit/s.  An
upload without an answer in time is tried again with a quarter of the bytes in flight; the minimum is 5 MiB in
REQUEST_S, or 0.35 Mbit/s.  If one part fails, the client repeats only that part.

Not promised: that a second try of an upload reuses parts of the first.
"""

LEAST = 5 << 20
FIRST = 64 << 20  # bytes in flight before the first measurement
REQUEST_S = 120.0


class Uplink:
    """One process's link to one bucket.   request_s: time limit of a request, in seconds."""

    def __init__(self, request_s: float = REQUEST_S) -> None:
        self.request_s = request_s
        self.in_flight = FIRST

    def parts(self, size: int, part: int, at_once: int, most_parts: int) -> tuple[int, int]:
        """Return (bytes of a part, parts at a time) for an upload of `size` bytes.

        Both numbers are at most `part` and `at_once`, but a part is larger if there would be more than `most_parts`.
        """
        each = min(part, max(LEAST, self.in_flight // at_once))
        return max(each, -(-size // most_parts)), max(1, min(at_once, self.in_flight // each))

    def note_upload(self, size: int, seconds: float, most: int) -> None:
        """Note a successful upload of `size` bytes, unless it was small.   most: the limit of the bytes in flight."""
        if size >= LEAST:
            self.in_flight = int(min(most, max(LEAST, size / max(seconds, 1e-6) * self.request_s / 2)))

    def slow_down(self) -> bool:
        """Reduce the bytes in flight, after an upload without an answer.   Return whether they were reduced."""
        before = self.in_flight
        self.in_flight = max(LEAST, before // 4)
        return self.in_flight < before

"""Number of bytes of an upload that are on their way at a time, by the measured rate of the link.

    in flight = rate · REQUEST_S / 2       from one part of 5 MiB (S3's least) to 8 parts of 32 MiB
    parts     = 8 at a time, each in flight / 8; below 40 MiB in flight fewer, of 5 MiB

A request has a time limit, and all parts in flight share the link: 256 MiB in 300 s were 7.2 Mbit/s, and a slower link
never finished.  An upload that got no answer in time is tried again with a quarter in flight: 5 MiB in REQUEST_S, or
0.35 Mbit/s, is the least.  Parts that arrived are kept while the client repeats one that failed.

Not promised: parts that are kept from one try of an upload to the next.
"""

LEAST = 5 << 20
FIRST = 64 << 20  # before anything was measured
REQUEST_S = 120.0


class Uplink:
    """One process's link to one bucket.   request_s: seconds after which a request is given up."""

    def __init__(self, request_s: float = REQUEST_S) -> None:
        self.request_s = request_s
        self.in_flight = FIRST

    def parts(self, size: int, part: int, at_once: int, most_parts: int) -> tuple[int, int]:
        """Return (bytes of a part, parts at a time) for `size` bytes, at most `part` and `at_once`."""
        each = min(part, max(LEAST, self.in_flight // at_once))
        return max(each, -(-size // most_parts)), max(1, min(at_once, self.in_flight // each))

    def note_upload(self, size: int, seconds: float, most: int) -> None:
        """Note an upload that has ended well.   most: bytes that may be in flight."""
        if size >= LEAST:
            self.in_flight = int(min(most, max(LEAST, size / max(seconds, 1e-6) * self.request_s / 2)))

    def can_slow_down(self) -> bool:
        """Put less in flight, after an upload without an answer; -> whether that was possible."""
        before = self.in_flight
        self.in_flight = max(LEAST, before // 4)
        return self.in_flight < before

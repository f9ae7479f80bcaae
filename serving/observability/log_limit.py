"""`LogLimit`: the same warning again and again, as somebody outside can cause it, does not fill a disk."""

import logging
import time

SECONDS = 10.0
MOST = 10  # of one text in so many seconds
MOST_TEXTS = 1000


class LogLimit(logging.Filter):
    """Lets `MOST` warnings or errors of one text pass in `SECONDS`; the next one says how many did not."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        if record.levelno < logging.WARNING:
            return True
        key, now = (record.name, str(record.msg)), time.monotonic()
        began, count = self._seen.get(key, (now, 0))
        if now - began >= SECONDS:
            if count > MOST:
                record.msg = f"{record.msg} (and {count - MOST} more like it in the {now - began:.0f} s before)"
            began, count = now, 0
        if len(self._seen) >= MOST_TEXTS:
            self._seen.clear()
        self._seen[key] = began, count + 1
        return count < MOST

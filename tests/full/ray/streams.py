"""Streams that are read at the same time, and their outcomes."""

import threading
import time

from sharp import SamplingParams
from sharp.serving.api.errors import UnavailableError


def greedy(tokens, **options):
    return SamplingParams(temperature=0, max_tokens=tokens, **options)


def prompt(number):
    return f"{number} !"


def counted(prompt, count):
    return "".join(chr(ord(prompt[-1]) + 1 + step) for step in range(count))


class Streams:
    """Streams of given numbers of tokens, each read in its own thread.

    `lengths` has the number of tokens by the number of the stream. With `again`, another client, a stream that fails
    with its server is sent once more, after the time that the error says.
    """

    def __init__(self, client, lengths, *, again=None):
        self.lengths = lengths
        self.begun, self.failed, self.completions = set(), {}, {}
        self._client, self._again = client, again
        self._threads = [threading.Thread(target=self._ask, args=(n,), daemon=True) for n in lengths]
        for thread in self._threads:
            thread.start()

    def _ask(self, number):
        params, parts = greedy(self.lengths[number]), []
        try:
            for event in self._client.stream(prompt(number), params):
                self.begun.add(number)
                parts.append(getattr(event, "text", ""))
            self.completions[number] = "".join(parts)
        except UnavailableError as error:
            self.failed[number] = error
            if self._again:
                time.sleep(error.retry_after)
                self.completions[number] = self._again.generate(prompt(number), params).text

    def join(self, seconds=90):
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0, deadline - time.monotonic()))
        complete = {number for number in self.lengths if self._again or number not in self.failed}
        assert self.completions == {number: counted("!", self.lengths[number]) for number in complete}

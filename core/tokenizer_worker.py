"""The program of `sharp.core.tokenizer_trial`, which loads a `tokenizer.json` and uses it once.

The program imports nothing of Sharp, so it starts at once. It prints a line of JSON. A process that ends without this
line was ended by a limit, or by the library, which aborts when memory runs out.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

from tokenizers import Tokenizer


def main(path: str, seconds: float, memory: int) -> None:
    """Try the file at `path`, and print why it cannot be used as a JSON string, empty if it can.

    `seconds` limits the processor time, and `memory` the bytes of address space beyond those already taken. A process
    that exceeds a limit may end without printing.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # silences the backtrace that a panic writes to stderr
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    error = ""
    try:
        tokenizer = Tokenizer.from_file(path)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        for special in (True, False):
            try:
                (encoding,) = tokenizer.encode_batch_fast(["A word, é 1."], add_special_tokens=special)
                tokenizer.decode(encoding.ids)
            except Exception:  # noqa: S110  # a vocabulary may lack these letters
                pass
        tokenizer.decode([0, 0])
    except BaseException as caught:  # a panic of the library is no Exception
        error = str(caught).strip() or type(caught).__name__
    print(json.dumps(error[:400].splitlines()[0] if error else ""))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))

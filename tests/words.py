"""Find words of our own for things that have names, and sentences that say nothing alone; a part of `make lint`.

`python -m tests.words` prints every place with the word to use instead; the exit code is 1 if there is one.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# A word before the noun "answer", or "answer" in the name of a test. The papers of the tasks in `models` say question
# and answer.
ANSWER = (
    r"(?:the|this|that|these|those|both|all|several|two|first|last|other|same|right|wrong|plain|\w+'s)"
    r" answers?(?! tokens)"
    r"|test_\w*answer\w*"
)
TASKS = ("models/", "tests/models/")
# Words that leave the noun to a sentence before them, so that a reader of one docstring does not know it.
WITHOUT_NOUN = (r"for one in", r"so\smany(?!.* that)", r'"""(?:As|How|Of|See|The same|Those|What)')
INSTEAD = {  # a regular expression of words, and the field's word for them
    r"(?:an?|each|every|its|whole|one|no|of|new|long) answers?": "a completion, a sequence, a response",
    r"answers? of": "completions of",
    ANSWER: "a completion, a response, the expected output",
    r"guess(?:es|ed|ing)?": "draft tokens, speculative decoding; else: estimate",
    r"drawn": "random, randomly generated, sampled",
    r"plain read": "memory bandwidth",
    r"asked for|wanted": "requested, expected; of a figure: target",
    r"by hand": "ad hoc, not archived; of code: written out, explicitly",
    r"hostile numbers": "NaN, Inf, out-of-range values",
    r"everyone may ask": "authentication: none",
    r"every edge|all edges|edges of the server": "API frontends (gRPC, HTTP, KServe)",
    r"(?:in|take|takes|taking) (?:\w+ )?turns|in turn(?!\.)": "interleaved",
    r"(?:tried )?in vain": "negative results",
    r"remembered": "cached, hashed",
    r"what is not here|what a cache has beside it": "limitations; auxiliary cache tensors",
    **dict.fromkeys(WITHOUT_NOUN, "the noun, the number, or the verb of the function"),
}
# names of modules that say nothing about their content
PRIVATE_FILES = {"answer", "call", "kinds", "place", "remembered", "served", "wish"}
CHECKED = (
    ".py",
    ".md",
    ".proto",
    ".toml",
    ".yaml",
    ".yml",
    ".cc",
    ".h",
    ".cu",
    ".json",
    ".html",
    ".js",
    ".mjs",
    ".sh",
    ".jinja",
)
# This list itself, the notes of releases, measured data, and texts that others wrote.
EXCEPT = ("tests/words.py", "CHANGELOG.md", "bench/results/", "models/results/", "tests/durations.json")
# An underscore between letters of one identifier counts as a space.
WORD = re.compile(
    "|".join(
        rf"(?P<w{number}>(?<![A-Za-z])(?:{words.replace(' ', '[ _]')})(?![A-Za-z]))"
        for number, words in enumerate(INSTEAD)
    ),
    re.IGNORECASE,
)


def main() -> int:
    """Print every private word in the files of git with the word to use instead, and return the exit code."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    found = 0
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if not name.endswith(CHECKED) or name.startswith(EXCEPT) or path.is_symlink() or not path.is_file():
            continue
        if path.suffix == ".py" and path.stem in PRIVATE_FILES:
            print(f"{name}: a module is named after what it holds")
            found += 1
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for match in WORD.finditer(line):
                words, instead = list(INSTEAD.items())[int((match.lastgroup or "w0")[1:])]
                if words == ANSWER and name.startswith(TASKS):
                    continue
                print(f"{name}:{number}: {match[0]!r}; say {instead}")
                found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())

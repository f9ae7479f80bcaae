"""Outcomes of guides for JSON Schema's test suite, as the source package of `jsonschema` contains it.

`pip download --no-deps --no-binary :all: jsonschema` fetches the package; the suite is its folder `json/tests`.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from sharp.serving.engine.guide import prepared_schema
from sharp.serving.engine.guide_worker import make_matcher, make_vocabulary
from tests.serving.conftest import EOS, VOCAB, byte_tokenizer

OUTCOMES = ("accepted", "rejected", "narrower", "wrong", "refused")


def outcomes(draft: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the file, the name and the outcome of every test of a draft.

    A valid text is accepted, or left out by a guide that is narrower than its schema. An invalid text is rejected, or
    wrongly accepted. A schema that no guide can follow is refused as a whole.
    """
    vocabulary = make_vocabulary(byte_tokenizer().to_str(), VOCAB, [EOS])
    for path in sorted(draft.rglob("*.json")):
        for group in json.loads(path.read_text()):
            schema = prepared_schema(json.dumps(group["schema"]), compact=True)
            try:
                matcher = make_matcher(vocabulary, "json", schema)
            except ValueError:
                matcher = None
            for test in group["tests"]:
                name = f"{group['description']}: {test['description']}"
                if matcher is None or matcher.get_error():
                    yield str(path.relative_to(draft)), name, "refused"
                    continue
                matcher.reset()
                text = json.dumps(test["data"], separators=(",", ":"), ensure_ascii=False).encode()
                matches = matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting()
                kind = (
                    ("accepted" if test["valid"] else "wrong")
                    if matches
                    else "narrower"
                    if test["valid"]
                    else "rejected"
                )
                yield str(path.relative_to(draft)), name, kind


def table(suite: Path) -> str:
    """Return the outcomes of every draft, required and optional tests apart, as Markdown."""
    lines = [f"| draft | {' | '.join(OUTCOMES)} |", "| --- |" + " ---: |" * len(OUTCOMES)]
    for draft in sorted(path for path in suite.glob("draft[0-9]*") if path.is_dir()):
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for file, _, kind in outcomes(draft):
            counts["optional" if file.startswith("optional") else "required"][kind] += 1
        for part in ("required", "optional"):
            lines.append(f"| {draft.name}, {part} | " + " | ".join(str(counts[part][kind]) for kind in OUTCOMES) + " |")
    return "\n".join(lines)

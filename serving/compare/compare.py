"""`compare`: runs a comparison. `open_reader`: chooses the program that reads what `--with` names."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sharp.core.failed_connection import check_no_address, is_url
from sharp.core.http_connection import HttpConnection
from sharp.core.hub import download_command, is_hub_id
from sharp.core.licence import licence
from sharp.core.manifest import MANIFEST_FILE
from sharp.serving.api.errors import InputError, NotFoundError
from sharp.serving.api.events import TokenLogprobs
from sharp.serving.api.sampling_params import SamplingParams
from sharp.serving.compare.comparison import Comparison, Ends, TextComparison, compare_stops, compare_text
from sharp.serving.compare.library_reader import LibraryReader
from sharp.serving.compare.reading import TOP, Distribution, Reader, Reading, ReadingTask, StopTokens
from sharp.serving.compare.server_reader import ServerReader
from sharp.serving.compare.tolerance import Tolerance, folder_precision, tolerance_of
from sharp.serving.config import BackendConfig
from sharp.serving.llm import LLM
from sharp.serving.text.tokenizer import Tokenizer

MOST_BYTES = 2**24  # limit for a user's file
MOST_SPECIAL = 8  # tokens in the text made of a tokenizer's special tokens

HARD_TEXTS = {
    "prose": "The cat sat on the mat, and the dog didn't mind; it's their house, they'll share it.",
    "code": (
        "def mean(rows):\n    total = 0.0\n    for row in rows:\n        if row is not None:\n            "
        "total += row\n\n    return total / max(1, len(rows))\n"
    ),
    "tabs, blank lines": "a\tb\t\tc\n\n\n\td\r\n \n  e   \n",
    "digits": "In 1969 pi was 3.14159265358979, 1234567890 > 999,999.99 and 0x7fff == 32767; call +1 (555) 010-9999.",
    "spaces": "one  two   three    four     five      six        eight          ten ",
    "outer spaces": "  two spaces at the start, and two at the end  ",
    "contractions": "I'M sure WE'VE seen it: you're, he'd, 'tis, rock'n'roll, can't, O'Neill's",
    "accents": "Der Fluß fließt; naïve façade, Ångström, São Paulo, e\u0301 is e with a combining accent.",
    "CJK": "你好，世界。今日は良い天気です。 안녕하세요 세계",
    "scripts": "Привет, мир! שלום עולם مرحبا بالعالم नमस्ते दुनिया สวัสดีชาวโลก",
    "emoji": "👍🏽 👩‍👩‍👧 🇨🇭 ❤️ and a flag 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "symbols": "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, “quotes” — dashes … ½ № ™ \u00a0no-break\u200bzero-width",
    "JSON": '{\n  "name": "Ada",\n  "scores": [1, 2.50, -3e-7],\n  "nested": {"ok": true, "none": null}\n}',
    "markup": '<p class="x">a &amp; b</p> <!-- http://example.com/?q=1&r=%20 --> **bold** `code`',
}


@dataclass(frozen=True)
class CompareSettings:
    """The user's settings. The fields are options of `sharp compare`.

    Attributes:
        texts: files of the texts to compare; empty means the built-in texts.
        tokens: most tokens of a text, which is cut.
        new_tokens: the number of tokens to generate after a text.
        tolerance: the mean difference of log-probabilities that is allowed, in nats; None chooses it by precision.
        trust_remote_code: run the Python code that a Hugging Face folder has.
        model: name of the model on the server; None means the first that it lists.
        token: the server's bearer token.
        timeout: seconds that a reply may take.
        device: where the model folder runs: "auto", "cpu" or "cuda".
    """

    texts: tuple[Path, ...] = ()
    tokens: int = 512
    new_tokens: int = 16
    tolerance: float | None = None
    trust_remote_code: bool = False
    model: str | None = None
    token: str | None = None
    timeout: float = 600.0
    device: str = "auto"


class OwnModel:
    """A `Reader` of a Sharp model folder."""

    def __init__(self, folder: Path, device: str) -> None:
        """Load the folder.

        Raises:
            NotFoundError: there is no model folder.
            InputError: the folder cannot be used, or has no tokenizer.
        """
        self._llm = LLM(folder, backend=BackendConfig(device=device))
        self.manifest = self._llm.model.manifest
        if self._llm.model.tokenizer is None:
            raise InputError(
                f"{folder} has no tokenizer, so it reads no text that could be compared; export it with a tokenizer"
            )
        self.tokenizer = self._llm.model.tokenizer
        self.name = str(folder)
        self.precision = folder_precision(self.manifest)

    @property
    def context(self) -> int:
        """The length, in tokens, of the longest sequence that a request may grow to."""
        return self._llm.model.context_limit

    def tokens(self, text: str) -> Sequence[int]:
        """Return the token ids of a text in the folder's tokenizer."""
        return self.tokenizer.encode(text)

    def stops(self, declared: frozenset[int]) -> StopTokens:
        """Return the folder's stop tokens, which are the only tokens that end a completion."""
        return StopTokens(declared, declared)

    def read(self, prompt: ReadingTask) -> Reading:
        """Return log-probabilities for each token of the prompt but the first, and for a greedy continuation."""
        # Every parameter is given, because a checkpoint may bring its own defaults, such as a repetition penalty.
        params = SamplingParams(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            max_tokens=prompt.new_tokens,
            logprobs=TOP,
            prompt_logprobs=TOP,
        )
        (completion,) = self._llm.generate([list(prompt.token_ids)], params)
        return Reading(
            [_distribution(entry) for entry in completion.prompt_logprobs or ()],
            completion.token_ids,
            [_distribution(entry) for entry in completion.logprobs or ()],
        )


def _distribution(entry: TokenLogprobs) -> Distribution:
    """Return log-probabilities by token id: the top ones and the token's own."""
    return {**dict(entry.top), entry.token_id: entry.logprob}


def texts_of(files: Sequence[Path], tokenizer: Tokenizer) -> dict[str, str]:
    """Return the texts by name: the contents of the files, or the built-in texts if there are no files.

    Raises:
        NotFoundError: a file does not exist.
        InputError: a file is too large, empty or not UTF-8.
    """
    if files:
        return {str(file): _read(file) for file in files}
    texts = dict(HARD_TEXTS)
    if special := tokenizer.special_texts[:MOST_SPECIAL]:
        texts["special tokens"] = " ".join(f"a{token} {token}b" for token in special)
    texts["licence"] = licence().read_text(encoding="utf-8")
    return texts


def cut_to(text: str, most: int, tokenizer: Tokenizer) -> str:
    """Return the longest start of a text, up to rounding, that has at most `most` tokens."""
    text = text[: 32 * most]  # a tokenizer is slow on a whole book
    while (count := len(tokenizer.encode(text))) > most:
        text = text[: min(len(text) - 1, len(text) * most // count)]
    return text


def _read(file: Path) -> str:
    """Return the text of a file of at most `MOST_BYTES` bytes of UTF-8.

    Raises:
        NotFoundError: there is no such file.
        InputError: it is empty, too large or not UTF-8.
    """
    if not file.is_file():
        raise NotFoundError(f"--text {file} is no file; give a text")
    if file.stat().st_size > MOST_BYTES:
        raise InputError(f"--text {file} has {file.stat().st_size} bytes; the limit is {MOST_BYTES}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise InputError(f"--text {file} is not UTF-8; give another text") from error
    if not text:
        raise InputError(f"--text {file} is empty; give a text")
    return text


def compare(folder: Path, other: str, settings: CompareSettings, on_text: Callable[[int], None]) -> Comparison:
    """Compare a model folder with another reader of its model.

    `on_text` is called after each text with the total number of texts.

    Raises:
        NotFoundError: there is no such folder, file or text.
        InputError: the folder, the other program or a text cannot be used, or nothing could be compared.
        SharpError: the other program fails.
    """
    _check_kind(other, settings)  # check before the folder is loaded, which takes long
    own = OwnModel(folder, settings.device)
    texts = texts_of(settings.texts, own.tokenizer)
    most = min(settings.tokens, own.context - settings.new_tokens)
    if most < 2:
        raise InputError(f"{folder} has a context of {own.context} tokens; give fewer --new-tokens")
    declared = frozenset(own.manifest.tokenizer.eos_token_ids)
    with open_reader(other, most + settings.new_tokens, settings) as reader:
        tolerance = tolerance_of(own.precision, reader.precision)
        if settings.tolerance is not None:
            tolerance = Tolerance(settings.tolerance)
        stops, missing, extra = compare_stops(declared, reader.stops(declared))
        ends = Ends(declared, frozenset() if stops is None else stops[1].allowed)
        found: list[TextComparison] = []
        for name, text in texts.items():
            cut = cut_to(text, most, own.tokenizer)
            prompt = ReadingTask(cut, tuple(own.tokens(cut)), settings.new_tokens)
            if prompt.token_ids:
                found.append(
                    compare_text(
                        name,
                        prompt,
                        reader.tokens(cut),
                        own.read(prompt),
                        reader.read(prompt),
                        tolerance=tolerance,
                        stops=ends,
                        text_of=own.tokenizer.token,
                    )
                )
            on_text(len(texts))
        result = Comparison(own.name, reader.name, tolerance, tuple(found), stops, missing, extra)
    if not result.something:
        raise InputError(f"{reader.name} gives nothing that could be compared: no tokens and no log-probabilities")
    return result


@contextmanager
def open_reader(other: str, context: int, settings: CompareSettings) -> Iterator[Reader]:
    """Yield a reader of what `--with` names, for sequences of up to `context` tokens; its process ends with the block.

    Raises:
        InputError: the other program or the model cannot be used.
        SharpError: the other program fails.
    """
    if is_url(other):
        connection = HttpConnection(other, token=settings.token, seconds=settings.timeout)
        yield ServerReader(connection, settings.model)
        return
    with LibraryReader(
        Path(other), context, trust_remote_code=settings.trust_remote_code, seconds=settings.timeout
    ) as reader:
        yield reader


def _check_kind(other: str, settings: CompareSettings) -> None:
    """Check that `--with` names something to compare with, and that the options fit it.

    Raises:
        NotFoundError: there is no such file or folder.
        InputError: no other program reads what is there, or an option does not apply to it.
        SharpError: no server responds at a URL.
    """
    check_no_address(other)
    if is_url(other):
        if settings.trust_remote_code:
            raise InputError("--trust-remote-code is for a Hugging Face folder, and --with is a server; leave it out")
        HttpConnection(other, token=settings.token, seconds=settings.timeout).check_responds()
        return
    if settings.model is not None:
        raise InputError("--model is for a server; leave it out")
    path = Path(other)
    if not path.exists():
        raise NotFoundError(
            f"--with {other} does not exist; give a URL such as http://127.0.0.1:8000, a .gguf file or a Hugging Face "
            "folder" + (f", which is fetched with: {download_command(other)}" if is_hub_id(other) else "")
        )
    if path.is_dir():
        if (path / MANIFEST_FILE).is_file():
            raise InputError(
                f"--with {other} is a model folder of Sharp, which is no second opinion; give what it was exported from"
            )
        if not (path / "config.json").is_file():
            raise InputError(f"--with {other} has no config.json, so it is no Hugging Face folder")
    elif path.suffix != ".gguf":
        raise InputError(f"--with {other} is no .gguf file; give one, a Hugging Face folder or a server's URL")
    elif settings.trust_remote_code:
        raise InputError("--trust-remote-code is for a Hugging Face folder, and --with is a GGUF file; leave it out")

"""Embeddings beside sentence-transformers: texts a second in float32, interleaved, in one process.

python -m bench.embeddings [--checkpoint FOLDER] [--texts 512] [--threads 2] [--output bench/results/embeddings.json]

The checkpoint is a folder of sentence-transformers; without one it is random, of MiniLM's size (6 layers of 384).
The texts are words of the licence, of lognormal lengths as sentences and paragraphs have. Both begin with a text, so
both tokenize. "together" encodes all texts in one call, and "apart" each text in a call of its own. For Sharp the
latter are requests that wait together, as in a server, whose HTTP is not measured. Rounds go round the subjects, and
medians are compared.
On a machine with other work: --threads 1 --processor-time.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.interleaving import pause
from bench.result_file import header, write
from sharp.core.cli import SharpCommand
from sharp.core.machine import available_cpus
from sharp.serving.api.encoding import EncodeRequest
from sharp.serving.api.events import ComputedRows, Failed
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.encoder.folder import load_encoder_folder
from sharp.serving.encoder_config import EncoderConfig

PACKAGES = ("sharp-attention", "onnxruntime", "sentence-transformers", "transformers", "torch", "numpy")
MINILM = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
}
WORDS = Path(__file__).parents[1] / "LICENSE"
MEDIAN_WORDS, SPREAD = 16, 0.7
MOST_DIFFERENCE = 1e-5

Encode = Callable[[Sequence[str], bool], Any]  # texts, together -> embeddings [texts, size]


def random_texts(count: int) -> list[str]:
    """Return texts of random words of the licence, most of them as long as a sentence; the same in every call."""
    words, generator = WORDS.read_text(encoding="utf-8").split(), random.Random(0)
    lengths = [max(1, int(generator.lognormvariate(np.log(MEDIAN_WORDS), SPREAD))) for _ in range(count)]
    return [" ".join(generator.choices(words, k=length)) for length in lengths]


def sharp(folder: Path, threads: int) -> Encode:
    """Return an encoder that is Sharp's engine in this process, over an exported folder.

    The encoder takes texts and whether they are encoded in one request; it returns embeddings [texts, size] of length
    1, and raises the error of a request that fails.
    """
    encoder, _, engine = load_encoder_folder(
        folder, BackendConfig(threads=threads), EngineConfig(attention_interval=0), EncoderConfig()
    )

    def encode(texts: Sequence[str], together: bool) -> Any:
        """Return the embeddings [texts, size], computed in one request, or one request per text unless `together`."""
        groups = [texts] if together else [[text] for text in texts]
        for number, group in enumerate(groups):
            engine.add(encoder.prepare_encoding(EncodeRequest(str(number), texts=group, truncate=-1)))
        found = {}
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, ComputedRows):
                    found[int(event.request_id)] = event.values
        engine.report()
        rows = np.concatenate([found[number] for number in range(len(groups))])
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    return encode


def sentence_transformers(checkpoint: Path, threads: int) -> Encode:
    """Return an encoder that is sentence-transformers on the CPU, used as in its documentation.

    The encoder takes texts and whether they are encoded in one call; it returns embeddings [texts, size] as the
    checkpoint makes them. Torch's threads are set to `threads`.
    """
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(checkpoint), device="cpu")

    def encode(texts: Sequence[str], together: bool) -> Any:
        """Return the embeddings [texts, size], computed in one call, or one call per text unless `together`."""
        if together:
            return model.encode(list(texts), show_progress_bar=False)
        return np.stack([model.encode(text, show_progress_bar=False) for text in texts])

    return encode


@click.command(cls=SharpCommand)
@click.option("--checkpoint", type=click.Path(path_type=Path), help="A folder of sentence-transformers.")
@click.option("--texts", default=512, show_default=True)
@click.option("--threads", default=available_cpus(), show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--processor-time", is_flag=True, help="Seconds of this thread instead of the clock's; with --threads 1.")
@click.option("--small", is_flag=True, help="A tiny random model, to see that it runs.")
@click.option("--output", type=click.Path(path_type=Path))
def main(
    checkpoint: Path | None,
    texts: int,
    threads: int,
    rounds: int,
    processor_time: bool,
    small: bool,
    output: Path | None,
) -> None:
    """Measure the embeddings per second of Sharp's engine and of sentence-transformers."""
    from tests.sentence_encoders import export_encoder, save_sentence_encoder

    clock = time.thread_time if processor_time else time.perf_counter
    with tempfile.TemporaryDirectory() as made:
        if checkpoint is None:
            checkpoint = save_sentence_encoder(Path(made) / "random", **({} if small else MINILM))
        link = Path(made) / checkpoint.name
        if not link.exists():
            link.symlink_to(checkpoint.resolve())
        subjects = {
            "sharp": sharp(export_encoder(link), threads),
            "sentence-transformers": sentence_transformers(checkpoint, threads),
        }
        inputs = random_texts(texts)
        result = header("embeddings", PACKAGES)
        result |= {
            "texts": texts,
            "threads": threads,
            "processor_time": processor_time,
            "model": checkpoint.name,
            "rows": [],
        }
        first, second = (encode(inputs, True) for encode in subjects.values())
        result["largest_difference"] = float(np.abs(first - second).max())
        for name, together in (("together", True), ("apart", False)):
            seconds: dict[str, list[float]] = {subject: [] for subject in subjects}
            for _ in range(rounds):
                for subject, encode in subjects.items():
                    pause()
                    began = clock()
                    encode(inputs, together)
                    seconds[subject].append(clock() - began)
            rates = {subject: texts / statistics.median(each) for subject, each in seconds.items()}
            ratio = rates["sharp"] / rates["sentence-transformers"]
            result["rows"] += [
                {"texts": name, "subject": subject, "texts_per_second": rate, "seconds": seconds[subject]}
                for subject, rate in rates.items()
            ]
            result["rows"][-2]["ratio"] = ratio  # of Sharp's row
            print(f"{name}: {', '.join(f'{peer} {rate:.1f}/s' for peer, rate in rates.items())}, ratio {ratio:.2f}")
    print(f"largest difference {result['largest_difference']:.1e}")
    write(output, result)
    if result["largest_difference"] > MOST_DIFFERENCE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

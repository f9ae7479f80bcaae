"""The training text of the byte-level demo model: a book and a dictionary that Debian ships as packages.

- debian-handbook: "The Debian Administrator's Handbook" by Raphaël Hertzog and Roland Mas, GPL-2+ or CC-BY-SA-3.0.
- wordnet-base: the glosses of WordNet, Princeton University, WordNet licence.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import torch
from torch import Tensor

from sharp.core.errors import NotFoundError
from sharp.models.byte_tokenizer import END_OF_TEXT_ID

CORPUS_FOLDER = Path("build/corpus")
HANDBOOK = Path("usr/share/doc/debian-handbook/html/en-US")
WORDNET = Path("usr/share/wordnet")
GLOSSES_PER_DOCUMENT = 20
VALIDATION_EVERY = 20  # one document in this many is held out

SKIPPED_CLASSES = {"docnav", "toc", "footnotes", "index", "keywordset", "legalnotice"}
SKIPPED_IDS = {"banner", "title"}
BLOCKS = {
    "div",
    "p",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "li",
    "ul",
    "ol",
    "dl",
    "dt",
    "dd",
    "table",
    "tr",
    "pre",
    "br",
}
VOID = {"br", "hr", "img", "input", "link", "meta", "area", "base", "col", "wbr"}


@dataclass(frozen=True)
class Corpus:
    """Documents of one kind as tokens, and their share of the training windows."""

    name: str
    share: float
    train: Tensor  # int16 [tokens], the documents in sequence, each ended by <|endoftext|>
    validation: Tensor  # int16 [tokens], documents that are not in `train`


class PageText(HTMLParser):
    """A parser for the running text of one page of the handbook, without navigation; `<pre>` keeps its line breaks."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.open: list[str] = []
        self.skip_from: int | None = None  # depth of the element that is skipped with its content
        self.pre_from: int | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Open an element: a block starts a line, and navigation is skipped."""
        if tag in BLOCKS:
            self.parts.append("\n")
        if tag == "li":
            self.parts.append("- ")
        if tag in VOID:
            return
        self.open.append(tag)
        attributes = dict(attrs)
        classes = set((attributes.get("class") or "").split())
        skipped = tag in ("head", "script", "style") or classes & SKIPPED_CLASSES or attributes.get("id") in SKIPPED_IDS
        if self.skip_from is None and skipped:
            self.skip_from = len(self.open)
        if self.pre_from is None and tag == "pre":
            self.pre_from = len(self.open)

    def handle_endtag(self, tag: str) -> None:
        """Close an element, and all elements that were left open inside it."""
        if tag in VOID or tag not in self.open:
            return
        while self.open.pop() != tag:
            pass
        depth = len(self.open)
        if self.skip_from is not None and depth < self.skip_from:
            self.skip_from = None
        if self.pre_from is not None and depth < self.pre_from:
            self.pre_from = None
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        """Append text to the page's parts, with line breaks and spaces folded; text of skipped elements is dropped."""
        if self.skip_from is None:
            # \v represents a line break of <pre> until the page's own line breaks are folded.
            self.parts.append(data.replace("\n", "\v") if self.pre_from is not None else re.sub(r"\s+", " ", data))


def page_text(html: str) -> str:
    """Return the running text of one page of HTML, one paragraph per line; `<pre>` keeps its own lines."""
    parser = PageText()
    parser.feed(html)
    parser.close()
    lines = [line.strip(" ") for line in "".join(parser.parts).split("\n")]
    text = "\n".join(line for line in lines if line and line != "-")
    text = text.replace("\u00a0", " ").replace("\u200b", "").replace("\v", "\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def handbook_documents(folder: Path) -> Iterator[str]:
    """Yield the text of the book's pages in `folder` by file name, without indexes and pages under 201 characters."""
    for path in sorted(folder.glob("*.html")):
        if path.stem not in ("index", "ix01"):
            text = page_text(path.read_text(encoding="utf-8"))
            if len(text) > 200:
                yield text


def wordnet_documents(folder: Path) -> Iterator[str]:
    """Yield dictionary pages of 20 neighbouring entries, one line `word, synonym (noun): gloss` per entry.

    `folder` holds WordNet's files data.noun, data.verb, data.adj and data.adv.
    """
    for part, suffix in (("noun", "noun"), ("verb", "verb"), ("adjective", "adj"), ("adverb", "adv")):
        entries = []
        for line in (folder / f"data.{suffix}").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("  "):  # the licence at the top
                continue
            fields, _, gloss = line.partition(" | ")
            columns = fields.split(" ")
            words = columns[4 : 4 + 2 * int(columns[3], 16) : 2]
            names = ", ".join(re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in words)
            entries.append(f"{names} ({part}): {gloss.strip()}")
        for start in range(0, len(entries), GLOSSES_PER_DOCUMENT):
            yield "\n".join(entries[start : start + GLOSSES_PER_DOCUMENT])


def load_corpora() -> list[Corpus]:
    """Load the text of the demo model from the system, or download missing packages into `CORPUS_FOLDER`.

    Raises:
        NotFoundError: a package is neither installed nor can be downloaded.
    """
    handbook = find_package("debian-handbook", HANDBOOK, CORPUS_FOLDER)
    wordnet = find_package("wordnet-base", WORDNET, CORPUS_FOLDER)
    return [
        make_corpus("handbook", 0.6, list(handbook_documents(handbook))),
        make_corpus("wordnet", 0.4, list(wordnet_documents(wordnet))),
    ]


def make_corpus(name: str, share: float, documents: list[str]) -> Corpus:
    """Encode `documents` as the corpus of this name; every twentieth document is held out for validation.

    `share` (0 to 1) is the corpus's part of the training windows.
    """
    held_out = [text for index, text in enumerate(documents) if index % VALIDATION_EVERY == VALIDATION_EVERY // 2]
    rest = [text for index, text in enumerate(documents) if index % VALIDATION_EVERY != VALIDATION_EVERY // 2]
    return Corpus(name, share, encode(rest), encode(held_out))


def encode(documents: list[str]) -> Tensor:
    """Encode documents as int16 [tokens]: the UTF-8 bytes of each document, followed by <|endoftext|> (256).

    Empty documents are left out; at least one must not be empty.
    """
    end = torch.tensor([END_OF_TEXT_ID], dtype=torch.int16)
    pieces = [
        torch.cat([torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(torch.int16), end])
        for text in documents
        if text
    ]
    return torch.cat(pieces)


def find_package(package: str, content: Path, corpus: Path) -> Path:
    """Return the folder `content` of a Debian package, which is installed, or unpacked under `corpus` without root.

    `content` is a path relative to the root of the file system. A package that is in neither place is downloaded.

    Raises:
        NotFoundError: the package cannot be downloaded or unpacked.
    """
    for root in (Path("/"), corpus):
        if (root / content).is_dir():
            return root / content
    corpus.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["apt-get", "download", package], cwd=corpus, check=True, capture_output=True, timeout=600)
        archive = sorted(corpus.glob(f"{package}_*.deb"))[-1]
        subprocess.run(["dpkg-deb", "-x", archive, corpus], check=True, capture_output=True, timeout=600)
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        raise NotFoundError(
            f"the text corpus needs the Debian package {package}, which could not be downloaded; "
            f"install it with: apt-get install {package}"
        ) from error
    return corpus / content

"""The demo's corpus has clean text out of HTML and WordNet, in splits that do not overlap."""

import pytest
import torch

from sharp.core.errors import NotFoundError
from sharp.models.text import encode, find_package, make_corpus, page_text, wordnet_documents

PAGE = """<html><head><title>Title</title><style>p {}</style></head><body><p id="title"><a>Site</a></p>
<ul class="docnav top"><li>Prev</li></ul><div class="section"><h2>6.2.&nbsp;The <code>apt</code>
 Command</h2><div class="para">
   One &amp; two<br/>three.
</div><pre class="screen">$ <b>ls</b>
a  b
</pre><ul><li>first</li><li>second</li></ul></div><ul class="docnav"><li>Next</li></ul></body></html>"""


def test_a_page_becomes_its_text():
    assert page_text(PAGE).splitlines() == [
        *("6.2. The apt Command", "One & two", "three.", "$ ls", "a  b", "", "- first", "- second")
    ]


def test_wordnet_entries_become_lines(tmp_path):
    line = '00001740 03 n 02 living_thing 0 being(p) 0 001 @ 00001930 n 0000 | a living entity; "a being"  \n'
    for suffix in ("noun", "verb", "adj", "adv"):
        (tmp_path / f"data.{suffix}").write_text("  1 licence\n" + (line if suffix == "noun" else ""))
    assert list(wordnet_documents(tmp_path)) == ['living thing, being (noun): a living entity; "a being"']


def test_documents_are_bytes_that_end_with_end_of_text():
    assert encode(["ab", "é"]).tolist() == [97, 98, 256, 195, 169, 256]


def test_one_document_of_twenty_is_held_out():
    corpus = make_corpus("letters", 1.0, [chr(97 + index) for index in range(20)])
    assert corpus.validation.tolist() == [ord("k"), 256]
    assert ord("k") not in corpus.train
    assert len(corpus.train) == 38
    assert corpus.train.dtype == torch.int16


def test_a_package_that_cannot_be_had_is_said_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotFoundError, match="apt-get install no-such-book"):
        find_package("no-such-book", tmp_path / "nowhere", tmp_path / "corpus")

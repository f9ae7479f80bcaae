"""The byte tokenizer: ids are bytes, and any text comes back."""

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sharp.models.byte_tokenizer import END_OF_TEXT, END_OF_TEXT_ID, VOCAB_SIZE, byte_tokenizer, save_byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text().filter(lambda text: END_OF_TEXT not in text))
def test_ids_are_the_bytes_and_decode_to_the_text(text):
    ids = TOKENIZER.encode(text).ids
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_every_byte_has_a_token():
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE
    text = "".join(map(chr, range(0x800))) + "\U0001f600\uffff"
    assert TOKENIZER.encode(text).ids == list(text.encode())


def test_end_of_text_is_one_token_that_is_left_out_of_the_text():
    ids = TOKENIZER.encode(f"a{END_OF_TEXT} b").ids
    assert ids == [97, END_OF_TEXT_ID, 32, 98]
    assert TOKENIZER.decode(ids) == "a b"


def test_the_saved_file_is_read_by_tokenizers(tmp_path):
    loaded = Tokenizer.from_file(str(save_byte_tokenizer(tmp_path)))
    assert loaded.decode(loaded.encode("naïve\t—\n").ids) == "naïve\t—\n"

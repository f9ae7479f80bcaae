import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FileTokenizer
from tokenizers import decoders, models, processors

from sharp.serving.text.detokenizer import Detokenizer
from sharp.serving.text.stop_condition import StopStrings
from sharp.serving.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(counting):
    return Tokenizer(counting / "tokenizer.json")


def pieces(tokenizer, token_ids):
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def test_characters_come_whole(tokenizer):
    assert pieces(tokenizer, "aé😀b".encode()) == ["a", "", "é", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_at_the_end_is_dropped(tokenizer):
    assert "".join(pieces(tokenizer, "ab😀".encode()[:-1])) == "ab"


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=40))
def test_pieces_add_up_to_the_text(tokenizer, text):
    assert "".join(pieces(tokenizer, tokenizer.encode(text))) == text


@given(token_ids=st.lists(st.integers(0, 256), max_size=60))
def test_any_bytes_give_what_decoding_them_at_once_gives(tokenizer, token_ids):
    shown = "".join(pieces(tokenizer, token_ids))
    assert shown.rstrip("\ufffd") == tokenizer.decode(token_ids).rstrip("\ufffd")


def test_a_long_run_of_broken_bytes_is_not_held_for_ever(tokenizer):
    assert sum(map(len, pieces(tokenizer, [0xFF] * 1000)[:-1])) > 900


@pytest.fixture
def sentence_piece(tmp_path):
    """Return a tokenizer like Llama's: a space belongs to the word that follows, and is not shown at a text's start."""
    words = ["<unk>", "<s>", "▁", "▁Paris", "▁is", "s", "<0xC3>", "<0xA9>"]
    file = FileTokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], byte_fallback=True))
    file.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    file.add_special_tokens(["<s>"])
    file.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    ("before", "token_ids", "text"),
    [
        (4, [3, 4], " Paris is"),  # after a word
        (4, [5, 3], "s Paris"),
        (2, [3], " Paris"),  # after a space
        (1, [3, 4], "Paris is"),  # at the start of a text
        (6, [3], "Paris"),  # after an incomplete character
        (None, [3], "Paris"),
        (4, [], ""),
    ],
)
def test_the_first_word_keeps_its_space_after_a_prompt(sentence_piece, before, token_ids, text):
    detokenizer = Detokenizer(sentence_piece, before)
    assert "".join([*map(detokenizer.push, token_ids), detokenizer.flush()]) == text


def test_a_token_alone_has_its_space(sentence_piece, tokenizer):
    assert [sentence_piece.token(token) for token in (1, 3, 4, 5, 6)] == ["<s>", " Paris", " is", "s", "\ufffd"]
    assert [tokenizer.token(token) for token in (97, 0xC3, 0xA9, 256)] == ["a", "\ufffd", "\ufffd", "<eos>"]


def test_the_tokenizer_file_says_which_special_tokens_a_prompt_gets(tmp_path, counting):
    file = FileTokenizer.from_file(str(counting / "tokenizer.json"))
    file.post_processor = processors.TemplateProcessing("<eos> $A", special_tokens=[("<eos>", 256)])
    file.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path / "tokenizer.json").encode("a") == [256, 97]


def feed(strings, *texts, with_it=False):
    matcher = StopStrings(strings, shown=with_it)
    shown = []
    for text in texts:
        text, matched = matcher.push(text)
        shown.append(text)
        if matched is not None:
            return shown, matched
    return [*shown, matcher.flush()], None


@pytest.mark.parametrize(
    ("strings", "texts", "shown", "matched"),
    [
        (("END",), ("a EN", "D b"), ["a ", ""], "END"),
        (("END",), ("a EN", "d b"), ["a ", "ENd b", ""], None),
        (("END",), ("a E", "N"), ["a ", "", "EN"], None),
        (("aab",), ("a", "a", "a", "b"), ["", "", "a", ""], "aab"),
        (("bc", "abcd"), ("abcd",), [""], "abcd"),
        (("bc", "abcd"), ("ab", "c", "d"), ["", "a"], "bc"),
        (("\n\n",), ("x\n", "y\n", "\nz"), ["x", "\ny", ""], "\n\n"),
        ((), ("abc",), ["abc", ""], None),
    ],
)
def test_stop_strings(strings, texts, shown, matched):
    assert feed(strings, *texts) == (shown, matched)
    *texts_before, last = feed(strings, *texts, with_it=True)[0]
    assert [*texts_before, last.removesuffix(matched or "")] == shown
    assert "".join(shown) + (matched or "") == "".join([*texts_before, last])


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=3), max_size=12),
)
def test_nothing_of_a_stop_string_is_shown_and_nothing_else_is_lost(strings, texts):
    shown, matched = feed(tuple(strings), *texts)
    whole = "".join(texts)
    assert whole.startswith("".join(shown))
    if matched is None:
        assert "".join(shown) == whole
        assert not any(string in whole for string in strings)
    else:
        assert whole[len("".join(shown)) :].startswith(matched)
        assert not any(string in "".join(shown) for string in strings)

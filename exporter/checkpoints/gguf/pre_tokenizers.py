"""The pre-tokenizers that `tokenizer.ggml.pre` names. They split a text into the parts that are merged into tokens.

Names and flags are those of llama.cpp (`llama-vocab.cpp`). llama.cpp approximates expressions that its engine for
regular expressions does not support. Where it quotes the original from `tokenizer.json`, this table has the original.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CAPITAL = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+"
CAPITALS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
CJK = r"[一-龥぀-ゟ゠-ヿ]+"
ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
GROUPED_DIGITS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{MARKS}|{SPACES}"
QWEN2 = rf"{CONTRACTION}|{WORD}|\p{{N}}|{MARKS}|{SPACES}"
QWEN35 = rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}"
JAIS2 = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{MARKS}|\s*[\r\n]+|" + "|".join(
    [*(rf"\s{{{width}}}(?!\S)" for width in (512, 256, 128, 64, 32, 16, 8, 4)), r"\s{1,2}(?!\S)", r"\s{1}"]
)
TEKKEN = rf"{CAPITAL}|{CAPITALS}|\p{{N}}|{SLASHES}|{SPACES}"
GPT4O = rf"{CAPITAL}{CONTRACTION}?|{CAPITALS}{CONTRACTION}?|\p{{N}}{{1,3}}|{SLASHES}|{SPACES}"
YOUTU = rf"{CAPITAL}{CONTRACTION}?|{CAPITALS}{CONTRACTION}?|\p{{N}}|{SLASHES}|{SPACES}"
DEEPSEEK3 = rf"{ASCII_MARKS}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}"
SPARK = rf"{ASCII_MARKS}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+"
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
SEED = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
UFAKZEKA = rf"{WORD}|\p{{N}}|{MARKS}|{SPACES}"
EXAONE_MOE = (
    rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
MINICPM5 = rf"{CONTRACTION}|{WORD}|\p{{N}}+|{MARKS}|{SPACES}"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# All letters of scripts with two cases, as DeepSeek's `tokenizer.json` lists them.
DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
AFMOE_SCRIPTS = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"


@dataclass(frozen=True)
class PreTokenizer:
    """Regular expressions that split a text one after the other. Each match becomes a part, as does the text between.

    With `ignore_merges`, a part that is a token stays whole. `adds_bos` is the default for files that do not say
    whether a text begins with the BOS token.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Return the pre-tokenizer of the library `tokenizers`."""
        splits = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in self.expressions]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _named(names: str, *expressions: str, **flags: bool) -> dict[str, PreTokenizer]:
    """Return one pre-tokenizer of these regular expressions under each of `names`, which are separated by spaces."""
    return {name: PreTokenizer(expressions, **flags) for name in names.split()}


DEFAULT = "default"
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **_named(DEFAULT, r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    **_named(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        LLAMA3,
        ignore_merges=True,
        adds_bos=True,
    ),
    **_named("dbrx smaug-bpe chatglm-bpe", LLAMA3),
    **_named("glm4 glm5", LLAMA3, ignore_merges=True),
    **_named("jais-2", JAIS2),
    **_named(
        "deepseek-llm",
        r"[\r\n]",
        rf"\s?[{DEEPSEEK_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    ),
    **_named("deepseek-coder", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    **_named("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", r"\p{N}{1,3}", CJK, DEEPSEEK3),
    **_named("spark2_5", r"\p{N}{1,3}", CJK, SPARK, r"\p{N}"),
    **_named("youtu", "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", YOUTU, ignore_merges=True),
    **_named("falcon", r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"),
    **_named("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", r"\p{N}", GPT2),
    **_named("gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling", GPT2),
    **_named("stablelm2 qwen2 deepseek-r1-qwen kormo f2llmv2 megrez hunyuan solar-open grok-2", QWEN2),
    **_named("qwen35", QWEN35),
    **_named("poro-chat bloom gpt3-finnish", BLOOM),
    **_named("viking", BLOOM, r"\p{N}"),
    **_named("tekken", TEKKEN, ignore_merges=True, adds_bos=True),
    **_named(
        "chameleon",
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2,
        adds_bos=True,
    ),
    **_named("gpt-4o llama4 kanana2 talkie minimax-m2", GPT4O),
    **_named("granite-embed-multi-97m", GPT4O, ignore_merges=True),
    **_named("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O),
    **_named("bailingmoe bailingmoe2 llada-moe", BAILING),
    **_named("seed-coder", SEED),
    **_named("ufakzeka", UFAKZEKA),
    **_named("afmoe", GROUPED_DIGITS, AFMOE_SCRIPTS, DEEPSEEK3),
    **_named("laguna", r"[^\n]+|[\n]+", QWEN2),
    **_named("exaone-moe", EXAONE_MOE),
    **_named("minicpm5", r"\p{N}{1,3}", MINICPM5, ignore_merges=True),
}
# Names in llama.cpp's list that Sharp refuses -> the reason.
REFUSED = {
    "kimi-k2": "its files have no merges",
    "superbpe": "its tokens reach over words",
    "gemma4": "its tokens are not spelled in bytes",
    "granite-embed-multi-311m": "its tokens are not spelled in bytes",
    "sarvam-moe": "its tokens are not spelled in bytes",
    "whitespace": "it is an encoder's",
    "jina-v1-en": "it is an encoder's",
    "jina-v2-code": "it is an encoder's",
    "jina-v2-es": "it is an encoder's",
    "jina-v2-de": "it is an encoder's",
    "jina-es": "it is an encoder's",
    "jina-de": "it is an encoder's",
    "roberta-bpe": "it is an encoder's",
    "modern-bert": "it is an encoder's",
}

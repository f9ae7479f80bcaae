"""Texts that tokenizers tend to split differently, and that need tokens of several words to show every split."""

CODE = "def f(xs):\n    for x in xs:\n        if x > 10_000:\n\t\t\treturn {\"a\": [1, 2.5e-3], 'b': None}\n\n\n# end"
JSON = '{\n    "name": "x",\n        "values": [\n            12345,\n            67\n        ]\n}'
TEXTS = (
    *("", " ", "  ", "   ", "\t", "\n", "\n\n", "\n\n\n", "\t\n", "\r\n\r\n", " \n \n", "a ", " a", "  a  "),
    *(
        "Hello, world!",
        "Hello World HELLO wORLD",
        "don't I'LL we'Ve it's 'S ''s",
        "x'",
        "naïve café Ärger ÄRGER Straße",
    ),
    *("1", "12", "123", "1234", "1234567", "3.14159 1,000,000 1e10 0x1F", "v1.2.3-rc4", "½ ² Ⅷ ٣٤٥ १२३४"),
    *("a1b22c333d4444", "你好，世界。今天天气", "今日はいい天気ですね。カタカナ", "안녕하세요 세계"),
    *("Привет, мир! ПРИВЕТ", "שלום עולם", "مرحبا بالعالم،", "नमस्ते दुनिया", "สวัสดีชาวโลก", "e\u0301 n\u0303o"),
    *(
        "👍 👩\u200d👩\u200d👧\u200d👦🏽 🇩🇪",
        "→ ∑ ≤ € $9.99 £5",
        "a\u00a0b\u2003c\u200bd",
        CODE,
        JSON,
        "    \n        x\n",
    ),
    *("a" * 40, " " * 37 + "x", "-" * 19 + "=" * 11 + "_" * 7, "(a)[b]{c}<d>;:\"'`~!@#%^&*|\\/?.,"),
    *("https://example.org/a?b=c&d=%20e#f", "foo@bar.com", "CamelCaseWORDSHere snake_case kebab-case"),
    *("…—“”‘’·•", "a\rb\r\nc", "<|im_start|>user\nHi<|im_end|>\n", "text<|endoftext|>more", "<s>[INST] x [/INST]</s>"),
    *("\ufeffbom \x00\x07\x1b[0m", "ǅ ǈ ʰ ª"),
)

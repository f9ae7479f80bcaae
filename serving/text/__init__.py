"""Text and tokens: tokenizer, chat templates, stop strings, and parsers of tool calls and reasoning."""

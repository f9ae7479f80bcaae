"""Text and tokens: tokenizer, chat templates, stop strings, tool calls."""

"""llama-index (OpenAILike): complete, chat, stream."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

BASE, MODEL, _ = sys.argv[1:]
common = {"model": MODEL, "api_base": f"{BASE}/v1", "api_key": "-", "temperature": 0, "max_tokens": 3, "max_retries": 0}
chat = OpenAILike(**common, is_chat_model=True)
assert chat.chat([ChatMessage(role="user", content="a")]).message.content == "bcd"
assert list(chat.stream_chat([ChatMessage(role="user", content="a")]))[-1].message.content == "bcd"
assert OpenAILike(**common, is_chat_model=False).complete("a").text == "bcd"
print("chat, stream_chat, complete")

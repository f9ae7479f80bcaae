"""litellm with models `openai/...` and `hosted_vllm/...`: completion, stream, and errors of litellm's own types."""

import sys

import litellm

BASE, MODEL, _ = sys.argv[1:]
litellm.suppress_debug_info = True
messages = [{"role": "user", "content": "a"}]
for prefix in ("openai", "hosted_vllm"):
    common = {
        "model": f"{prefix}/{MODEL}",
        "api_base": f"{BASE}/v1",
        "api_key": "-",
        "temperature": 0,
        "num_retries": 0,
    }
    assert litellm.completion(**common, messages=messages, max_tokens=3).choices[0].message.content == "bcd"
    parts = litellm.completion(**common, messages=messages, max_tokens=3, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "bcd"
    assert litellm.text_completion(**common, prompt="a", max_tokens=3).choices[0].text == "bcd"
    try:
        litellm.completion(**common, messages=[{"role": "user", "content": "x" * 300}])
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("no ContextWindowExceededError")
print("completion, text_completion, stream, ContextWindowExceededError; as openai/ and hosted_vllm/")

"""lm-eval: log likelihoods and text over /v1/completions with the server's own tokenizer, and chat."""

import json
import math
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
import lm_eval
import requests
from lm_eval.tasks import TaskManager

BASE, MODEL, _ = sys.argv[1:]
TEXT = "abcdefgh"
TASKS = {
    # The model counts, so "b" follows "a".
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": ["b", "c"],
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "text": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "bcd",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": TEXT,
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
}


def evaluate(folder, api, route, tasks, **arguments):
    results = lm_eval.simple_evaluate(
        api,
        model_args={"model": MODEL, "base_url": f"{BASE}{route}", "max_retries": 1, **arguments},
        tasks=tasks,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        apply_chat_template="chat" in api,
        bootstrap_iters=0,
    )
    return results["results"]


def log_probabilities():
    """Return log-probabilities of the text's tokens after the end-of-text token, as in lm-eval's rolling likelihood."""
    end = requests.get(f"{BASE}/tokenizer_info", timeout=30).json()["eos_token_id"]
    body = {"model": MODEL, "prompt": [end, *TEXT.encode()], "echo": True, "logprobs": 1, "max_tokens": 0}
    response = requests.post(f"{BASE}/v1/completions", json=body, timeout=30)
    return response.json()["choices"][0]["logprobs"]["token_logprobs"][1:]


with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    (folder / "data.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}}}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test", **data, **task}))
    whole = evaluate(folder, "local-completions", "/v1/completions", list(TASKS), tokenizer_backend="remote")
    assert whole["choice"]["acc,none"] == 1 and whole["text"]["exact_match,none"] == 1, whole
    perplexity = whole["perplexity"]["byte_perplexity,none"]
    assert math.isclose(len(TEXT) * math.log(perplexity), -sum(log_probabilities()), rel_tol=1e-5), whole
    chat = evaluate(folder, "local-chat-completions", "/v1/chat/completions", ["text"])
    assert chat["text"]["exact_match,none"] == 1, chat
print("local-completions (loglikelihood, rolling, generate_until; the server's tokenizer), local-chat-completions")

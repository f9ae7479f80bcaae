"""aiperf: a profile of streamed chats and a profile of completions, with the usage of every chunk."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

BASE, MODEL, _ = sys.argv[1:]
REQUESTS = 6
COMMAND = Path(sys.executable).with_name("aiperf")


def tokenizer(folder):
    """Write a byte tokenizer, like the model's, with which aiperf counts the tokens of prompts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return folder


def profile(folder, kind, *flags):
    (folder / "prompts.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    command = [COMMAND, "profile", "--model", MODEL, "--url", BASE, "--endpoint-type", kind, "--ui", "none"]
    command += ["--tokenizer", tokenizer(folder / "tokenizer"), "--input-file", folder / "prompts.jsonl"]
    command += ["--custom-dataset-type", "single_turn", "--request-count", str(REQUESTS), "--concurrency", "2"]
    command += ["--extra-inputs", "max_tokens:5", "--extra-inputs", "temperature:0"]
    command += ["--output-artifact-dir", folder / kind, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    written = json.loads(next((folder / kind).glob("**/profile_export_aiperf.json")).read_text())
    assert written["request_count"]["avg"] == REQUESTS, written
    assert written.get("error_request_count", {"avg": 0})["avg"] == 0, written
    assert written["output_sequence_length"]["avg"] == 5, written
    return written


with tempfile.TemporaryDirectory() as temporary:
    chat = profile(Path(temporary), "chat", "--streaming", "--per-chunk-usage", "--use-server-token-count")
    assert chat["time_to_first_token"]["avg"] > 0 and chat["inter_token_latency"]["avg"] > 0
    profile(Path(temporary), "completions")
print("profile: chat (--streaming, --per-chunk-usage, --use-server-token-count), completions")

"""guidellm: benchmarks of chats and completions in its default mode, with streams and usage."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

BASE, MODEL, _ = sys.argv[1:]
REQUESTS = 6
COMMAND = Path(sys.executable).with_name("guidellm")


def benchmark(folder, route):
    data, report = folder / "prompts.jsonl", folder / f"{route.replace('/', '_')}.json"
    data.write_text("".join(json.dumps({"prompt": "a"}) + "\n" for _ in range(REQUESTS)))
    backend = f"kind=openai_http,target={BASE},model={MODEL},request_format={route},max_tokens=5"
    command = [COMMAND, "run", "--disable-console", "--backend", backend, "--data", f"kind=json_file,path={data}"]
    command += ["--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}"]
    command += ["--output", f"kind=json,path={report}"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0 and report.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    return benchmark


with tempfile.TemporaryDirectory() as temporary:
    for route in ("/v1/chat/completions", "/v1/completions"):
        metrics = benchmark(Path(temporary), route)["metrics"]
        totals = metrics["request_totals"]
        assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0), totals
        # guidellm has no tokenizer here, so it counts tokens by the server's usage.
        assert metrics["output_token_count"]["successful"]["total_sum"] == 5 * REQUESTS
        assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0
print("run: /v1/chat/completions and /v1/completions, streams with usage")

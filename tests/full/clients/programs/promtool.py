"""promtool: checks /metrics, by layer, by head and with vLLM's names."""

import subprocess
import sys
import urllib.request

BASE, _, _, PROMTOOL = sys.argv[1:]
for query in ("", "?attention=head", "?name[]=sharp_requests_total"):
    with urllib.request.urlopen(f"{BASE}/metrics{query}", timeout=30) as response:
        text = response.read()
    assert text.startswith(b"# HELP"), text[:200]
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b""), done
print("check metrics: by layer, by head, by name")

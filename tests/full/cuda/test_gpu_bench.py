"""`bench/gpu/library.py` without a GPU: its ways to call an op launch the same work, and it reports errors."""

import json
import os
import subprocess
import sys

from tests.full.cuda.native import ROOT


def test_library_and_plugin_launch_the_same(libraries):
    finished = subprocess.run(
        [sys.executable, "-m", "tests.full.cuda.call_libraries", libraries],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries / "driver")},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    said = json.loads(finished.stdout)
    paged, attention = said["PagedAttention"], said["SharpAttention"]
    launches = paged["library"]
    assert [event.split()[1].split("@")[0] for event in launches] == [
        *("write_cache", "decode_observe", "decode_solve", "decode_settled", "merge", "prefill"),
    ]
    assert (
        "query=query" in launches[1]
        and "key_cache=key_cache" in launches[1]
        and "alibi_slopes=alibi_slopes" in launches[1]
    )
    assert "output=output" in launches[-1] and "stats=stats" in launches[-1] and "sums=memory" in launches[1]
    assert paged["plugin in place"] == launches
    copies, work = paged["plugin copying"][:2], paged["plugin copying"][2:]
    assert copies[0].startswith("copy to=memory from=key_cache") and copies[1].startswith(
        "copy to=memory from=value_cache"
    )
    copied = [event.replace("key_cache=key_cache", "key_cache=memory") for event in launches]
    assert work == [event.replace("value_cache=value_cache", "value_cache=memory") for event in copied]
    launches = attention["library"]
    assert [event.split()[1].split("@")[0] for event in launches[1:]] == ["write_present", "prefill"]
    assert "key_cache=past_key" in launches[1] and "past_lens=past_lens" in launches[1]
    assert attention["plugin in place"] == launches
    copies, work = attention["plugin copying"][:2], attention["plugin copying"][2:]
    assert [copy.split()[:4] for copy in copies] == [
        ["copy", "rows", "to=memory", f"from={past}"] for past in ("past_key", "past_value")
    ]
    copied = [event.replace("key_cache=past_key", "key_cache=memory") for event in launches]
    assert work == [event.replace("value_cache=past_value", "value_cache=memory") for event in copied]
    # The package has no kernels in bfloat16. The fake driver computes nothing, which must not count as right.
    built = [row for row in said["rows"] if row["built"]]
    assert {row["dtype"] for row in said["rows"]} == {"bfloat16", "float16", "float32"}
    assert built and {row["dtype"] for row in built} == {"float16", "float32"}
    assert not any(row["holds"] for row in built)


def test_without_a_gpu_it_says_so():
    finished = subprocess.run([sys.executable, "-m", "bench.gpu.library"], cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 2 and "finds no CUDA device" in finished.stderr

"""`bench/gpu_library.py` without a GPU: its three ways put the same work on the stream, and it sees what is wrong."""

import json
import os
import subprocess
import sys

from tests.cuda.native import ROOT


def test_library_and_plugin_launch_the_same(libraries):
    finished = subprocess.run(
        [sys.executable, "-m", "tests.cuda.call_libraries", libraries],
        env={**os.environ, "LD_LIBRARY_PATH": str(libraries / "driver")},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    said = json.loads(finished.stdout)
    launches = said["library"]
    assert [event.split()[1].split("@")[0] for event in launches] == [
        *("write_cache", "decode_observe", "decode_solve", "decode_settled", "merge", "prefill"),
    ]
    assert (
        "query=query" in launches[1]
        and "key_cache=key_cache" in launches[1]
        and "alibi_slopes=alibi_slopes" in launches[1]
    )
    assert "output=output" in launches[-1] and "stats=stats" in launches[-1] and "sums=memory" in launches[1]
    assert said["plugin in place"] == launches
    copies, work = said["plugin copying"][:2], said["plugin copying"][2:]
    assert copies[0].startswith("copy to=memory from=key_cache") and copies[1].startswith(
        "copy to=memory from=value_cache"
    )
    copied = [event.replace("key_cache=key_cache", "key_cache=memory") for event in launches]
    assert work == [event.replace("value_cache=value_cache", "value_cache=memory") for event in copied]
    # bfloat16 is not in the package; the fake driver computes nothing, which must not pass for right.
    built = [row for row in said["rows"] if row["built"]]
    assert {row["dtype"] for row in said["rows"]} == {"bfloat16", "float32"}
    assert built and {row["dtype"] for row in built} == {"float32"}
    assert not any(row["holds"] for row in built)


def test_without_a_gpu_it_says_so():
    finished = subprocess.run([sys.executable, ROOT / "bench" / "gpu_library.py"], capture_output=True, text=True)
    assert finished.returncode == 2 and "finds no CUDA device" in finished.stderr

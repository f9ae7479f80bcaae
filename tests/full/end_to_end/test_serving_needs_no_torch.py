"""Serving imports neither torch nor transformers nor Ray, because a server's image has none of them."""

import subprocess
import sys


def test_serving_imports_neither_torch_nor_transformers():
    code = (
        "import sys, sharp.serving, sharp.serving.cli\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnxscript', 'ray'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr

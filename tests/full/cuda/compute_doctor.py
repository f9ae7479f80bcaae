"""Run `sharp doctor --json` where ONNX Runtime's CUDA provider finds an interpreted GPU."""

import sys

from sharp.core.cli import main
from tests.full.cuda.computing import Device

device = Device()
try:
    main(["doctor", "--json"])
finally:
    sys.stderr.write("\n".join(device.failures))

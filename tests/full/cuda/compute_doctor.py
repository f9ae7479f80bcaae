"""`sharp doctor --json` where ONNX Runtime's CUDA provider finds a GPU that is interpreted."""

import sys

from sharp.plugins.cli import main
from tests.full.cuda.computing import Device

device = Device()
try:
    main(["doctor", "--json"])
finally:
    sys.stderr.write("\n".join(device.failures))

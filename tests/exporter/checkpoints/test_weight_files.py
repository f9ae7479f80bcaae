"""The number of weights that headers declare, of headers that no program writes, too."""

import json
import struct

import pytest

from sharp.core.errors import InputError
from sharp.exporter.checkpoints.path_checks import check_fits
from sharp.exporter.checkpoints.weight_files import declared_weights


def write(path, shape, offsets=(0, 0)):
    header = json.dumps({"weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return path


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([float("nan")], (0, 0)),
        ([1, float("inf")], (0, 0)),
        (["7"], (0, 0)),
        ([2**62, 2], (0, 0)),
        ([10**30] * 1000, (0, 0)),
        ([1], (0, float("inf"))),
    ],
)
def test_damaged_shapes_are_left_to_the_reader(tmp_path, shape, offsets):
    """Once a shape with NaN was a traceback: cannot convert float NaN to integer."""
    path = write(tmp_path / "model.safetensors", shape, offsets)
    assert declared_weights(path) == 0
    check_fits(path)


def test_whole_headers_count_and_files_that_are_cut_off_are_refused(tmp_path):
    assert declared_weights(write(tmp_path / "a.safetensors", [3, 4])) == 12
    with pytest.raises(InputError, match="is cut off"):
        declared_weights(write(tmp_path / "b.safetensors", [3, 4], (0, 48)))
    (tmp_path / "c.gguf").write_bytes(b"")
    with pytest.raises(InputError, match="is empty"):
        declared_weights(tmp_path / "c.gguf")

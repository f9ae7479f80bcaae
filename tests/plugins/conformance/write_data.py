"""`python -m tests.plugins.conformance.write_data`: write conformance data in the form of ONNX's backend tests.

A folder holds `model.onnx`, one node with its function body, and `test_data_set_0/`: inputs, and outputs by the float64
reference. `run_data.py` runs the data without any code of Sharp.
"""

import shutil
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from sharp.plugins.op.schema import NORMALIZERS
from tests.plugins.conformance import attention_cases, cases

DATA = Path(__file__).parent / "data"
SMALL = {"kv_heads": 1, "group": 2, "head_dim": 4, "value_dim": 6}
PAGED = cases.Shape(((0, 5), (18, 1), (9, 3)), **SMALL)  # type: ignore[arg-type]
CONCATENATING = attention_cases.Shape("concatenating", queries=3, new_keys=3, past=9, **SMALL)  # type: ignore[arg-type]
OPTIONS = {"softcap": 3.0, "window": 7, "alibi": True}


def data() -> Iterator[tuple[str, onnx.ModelProto, list[np.ndarray], list[np.ndarray]]]:
    """Yield the name, model, inputs and outputs of every test."""
    for normalizer in NORMALIZERS:
        yield _paged(f"paged_attention_{normalizer}", cases.make_case(normalizer, PAGED))
        yield _attention(f"attention_{normalizer}", attention_cases.make_case(normalizer, CONCATENATING))
    for normalizer in ("softmax", "ssa", "entmax"):
        yield _paged(
            f"paged_attention_{normalizer}_alibi_softcap_window", cases.make_case(normalizer, PAGED, **OPTIONS)
        )
    for normalizer in ("softmax", "ssa", "adaptive_softmax", "entmax"):
        yield _paged(f"paged_attention_{normalizer}_sinks", cases.make_case(normalizer, PAGED, sinks=True))
    sinks = attention_cases.make_case("softmax", CONCATENATING, sinks=True)
    yield _attention("attention_softmax_sinks", sinks)
    yield _paged("paged_attention_sparsemax", cases.make_case("entmax", PAGED, alpha=2.0))
    for form in ("none", "shared"):
        shape = attention_cases.Shape(form, queries=4, new_keys=4, past=12, padded=True, **SMALL)  # type: ignore[arg-type]
        causal = int(form == "shared")
        case = attention_cases.make_case("entmax", shape, causal=causal)
        yield _attention(f"attention_entmax_{form}_padded", case)


def _paged(name: str, case: cases.Case) -> tuple[str, onnx.ModelProto, list[np.ndarray], list[np.ndarray]]:
    return name, cases.make_model(case), [*case.inputs.values()], _float32(astuple(cases.run_reference(case)))


def _attention(
    name: str, case: attention_cases.Case
) -> tuple[str, onnx.ModelProto, list[np.ndarray], list[np.ndarray]]:
    expected = _float32(astuple(attention_cases.run_reference(case)))
    return name, attention_cases.make_model(case), [*case.inputs.values()], expected


def _float32(arrays: tuple[np.ndarray | None, ...]) -> list[np.ndarray]:
    """Return the outputs as float32, without the missing scales of int8 caches, which are None."""
    return [array.astype(np.float32) for array in arrays if array is not None]


def write(folder: Path) -> None:
    """Write all tests into `folder`, and remove its former content."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, model, inputs, outputs in data():
        tensors = folder / name / "test_data_set_0"
        tensors.mkdir(parents=True)
        onnx.save(model, folder / name / "model.onnx")
        for kind, arrays, values in (("input", inputs, model.graph.input), ("output", outputs, model.graph.output)):
            for index, (array, value) in enumerate(zip(arrays, values, strict=True)):
                tensor = numpy_helper.from_array(np.asarray(array), value.name)
                (tensors / f"{kind}_{index}.pb").write_bytes(tensor.SerializeToString())


if __name__ == "__main__":
    write(DATA)

"""`sharp doctor`'s way to run the Triton kernels."""

from concurrent.futures import ProcessPoolExecutor

from tests.full.triton import doctor_check


def test_triton_agrees_with_the_reference(interpreter: ProcessPoolExecutor) -> None:
    diagnosis = interpreter.submit(doctor_check.check).result()
    assert (diagnosis["status"], diagnosis["reason"]) == ("agrees", "")
    normalizers = ["softmax", "ssa", "adaptive_softmax", "entmax", "sigmoid", "relu", "relu2", "softpick"]
    dtypes = ("float32", "int8", "fp8")
    compared = [(each["dtype"], each["normalizer"]) for each in diagnosis["comparisons"]]
    assert compared == [(dtype, normalizer) for dtype in dtypes for normalizer in normalizers]

"""`sharp doctor`'s way to run the Triton kernels."""

from concurrent.futures import ProcessPoolExecutor

from tests.full.triton import doctor_check


def test_triton_agrees_with_the_reference(interpreter: ProcessPoolExecutor) -> None:
    diagnosis = interpreter.submit(doctor_check.check).result()
    assert (diagnosis["status"], diagnosis["reason"]) == ("agrees", "")
    normalizers = ["softmax", "ssa", "adaptive_softmax", "entmax"]
    assert [each["normalizer"] for each in diagnosis["comparisons"]] == normalizers * 3
    assert [each["dtype"] for each in diagnosis["comparisons"]] == ["float32"] * 4 + ["int8"] * 4 + ["fp8"] * 4

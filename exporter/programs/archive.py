"""Safe reading of `.pt2` files, which refuses a file whose content torch.export.load would execute.

torch.export.load trusts its file. It unpickles weights that are marked as pickles and example inputs that are more
than tensors, looks operators up by any name below `torch`, and evaluates expressions of sizes as Python. A file that it
fails to read is treated as a file of torch 2.7, which consists of pickles. So this module checks the archive first: it
may hold no pickles but of tensors, operators of ATen and of Sharp only, expressions of symbols and numbers only, and
its tensors may take no more memory than the file is large. The check uses torch's own reader, because another reader
might see other parts in the same file.
"""

import io
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
from torch.export import ExportedProgram
from torch.export.pt2_archive import PT2ArchiveReader
from torch.export.pt2_archive._package import load_pt2

import sharp.models.normalized_attention
import sharp.plugins.op.torch_paged_attention  # noqa: F401 - both register ops that a program may call
from sharp.core.errors import InputError
from sharp.exporter.programs.flat_graph import SUBGRAPH_CALLS

MOST_PARTS = 2**17
MOST_JSON = 2**28  # bytes
MOST_VALUES = 2**23  # in one JSON part of the archive
MOST_REPEATED = 2**28  # by how many elements the tensors may exceed their data, as expanded views do
OPERATORS = re.compile(r"torch\.ops\.(?:aten|prims|sharp)\.[a-zA-Z]\w*\.\w+|torch\.ops\.aten\._\w+\.\w+")
FORBIDDEN = re.compile(
    r"from_file|__|\.(?:data_ptr|set_|set_data|_print)\b"
)  # operators that read files or raw memory, or print
ARITHMETIC = re.compile(
    r"_operator\.(?:add|sub|mul|floordiv|truediv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_|getitem)"
    r"|torch\.sym_(?:int|float|max|min|not|ite|sum|sqrt)|torch\._sym_sqrt|math\.(?:ceil|floor|trunc|sqrt)"
)
SUBGRAPHS = {f"torch.ops.higher_order.{name}" for name in SUBGRAPH_CALLS}
FUNCTIONS = (
    "Max|Min|FloorDiv|CleanDiv|CeilDiv|Mod|PythonMod|ModularIndexing|Where|Eq|Ne|Gt|Lt|Ge|Le|And|Or|Not|Abs|Add|Mul|Pow|"
    "Integer|Float|Rational|Symbol|True|False|floor|ceiling|sqrt|oo|int_oo|IntTrueDiv|FloatTrueDiv|ToFloat|TruncToInt|"
    "CeilToInt|FloorToInt|RoundToInt|Identity"
)
ASSUMPTIONS = "positive|negative|nonnegative|nonpositive|nonzero|zero|integer|real|finite|evaluate"
EXPRESSION = re.compile(
    rf"(?:\b(?:[suzq]+\d+|{FUNCTIONS}|{ASSUMPTIONS}|\d{{1,12}}(?:\.\d+)?)\b|'[suzq]+\d+'|[-+*/%(), <>=&|~])*"
)
MOST_POWERS = 4  # a tower of powers would take all memory
SMALL_EXPONENT = re.compile(r",\s*Integer\(-?\d\)\)")
LARGE_EXPONENT = re.compile(r"\*\*\s*(?!\d\b)|\*\*\s*\d\s*\*\*")
CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")
SPECS = ("in_spec", "out_spec")


def load_program(path: Path) -> ExportedProgram:
    """Read a file that torch.export.save wrote. The guards of the program are removed.

    Raises:
        InputError: `path` is missing or is no regular file; or the file is damaged, was not written by
            torch.export.save, or holds what would be executed.
    """
    if not path.is_file():  # reading a pipe or a device might never end
        kind = "a folder" if path.is_dir() else "no regular file"
        raise InputError(f"{path} is {kind}, but must be a program that torch.export.save wrote")
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    with file, quiet():
        try:
            _check(PT2ArchiveReader(file), path.stat().st_size)
            _check_sums(file, path.stat().st_size)
        except InputError as error:
            raise InputError(f"{path} is not loaded: {error}") from error
        except Exception as error:  # json and torch's reader raise almost anything
            raise InputError(f"{path} is not a program of torch.export.save, or is damaged; save it again") from error
        file.seek(0)
        try:
            (program,) = load_pt2(file).exported_programs.values()
        except Exception as error:  # load_pt2 raises almost anything, too
            reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
            raise InputError(f"{path} cannot be read by torch {torch.__version__}: {reason}") from error
    program._guards_code = []  # guards are Python source, which nothing here needs
    return program


def _check(archive: PT2ArchiveReader, length: int) -> None:
    """Check the archive's parts before any is read: their number, names and sizes, within `length` bytes of the file.

    Raises:
        InputError: a part is not allowed, or there is not exactly one program.
    """
    names = archive.get_file_names()
    if len(names) > MOST_PARTS:
        raise InputError(f"it has {len(names)} parts, but may have {MOST_PARTS}")
    if len({*names}) != len(names):
        raise InputError("two of its parts have one name")
    sizes = {name: archive.archive_file.get_record_size(name) for name in names}
    if sum(sizes.values()) > length:
        raise InputError("its parts are compressed, or overlap; save the program again")
    models = [name for name in names if name.startswith("models/")]
    if len(models) != 1:
        raise InputError(f"it holds {len(models)} programs, but must hold one")
    if any(name.startswith("data/aotinductor") or name.endswith((".so", ".py")) for name in names):
        raise InputError("it holds compiled code; save the program itself with torch.export.save")
    for name in names:
        if re.fullmatch(r"data/(?:weights|constants)/[^/]*\.pt", name):
            raise InputError("its weights are pickled, by a torch before 2.8; save the program again")
        if re.fullmatch(r"data/(?:weights|constants)/[^/]*_config\.json", name):
            _check_payload(_json(archive, name, sizes), name.rpartition("/")[0], sizes)
        if name.startswith("data/sample_inputs/") and sizes[name]:
            torch.load(
                io.BytesIO(archive.read_bytes(name)), weights_only=True
            )  # fails if there is more than tensors; torch would unpickle anything
    _check_program(_json(archive, models[0], sizes))


def _check_sums(file: IO[bytes], length: int) -> None:
    """Check the checksums of all parts of an archive. torch ignores them and would load damaged weights.

    `file` is the archive, `length` its size in bytes.

    Raises:
        InputError: a part is damaged or compressed, or parts overlap.
    """
    file.seek(0)
    with zipfile.ZipFile(file) as parts:
        stored = all(part.compress_type == zipfile.ZIP_STORED for part in parts.infolist())
        if not stored or sum(part.file_size for part in parts.infolist()) > length:
            raise InputError("its parts are compressed, or overlap; save the program again")
        damaged = parts.testzip()
    if damaged is not None:
        raise InputError(f"its part {damaged} is damaged; copy or save it again")


def _json(archive: PT2ArchiveReader, name: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the JSON object of the archive's part `name`. InputError if it is too large or empty.

    `sizes` are the parts' sizes in bytes by name.
    """
    content = archive.read_bytes(name) if sizes[name] <= MOST_JSON else b""
    if not content or sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise InputError(f"its part {name} is {'too large' if sizes[name] else 'empty'}; save it again")
    found = json.loads(content)
    if not isinstance(found, dict):
        raise TypeError(name)
    return found


def _check_payload(config: dict[str, Any], folder: str, sizes: Mapping[str, int]) -> None:
    """Check that every tensor in a folder of the archive is plain bytes in a file of its own.

    `config` is the folder's JSON table of tensors by name, `sizes` the bytes of the archive's files by path.

    Raises:
        InputError: a tensor is pickled, missing or no tensor, or the shapes have far more numbers than the files.
    """
    repeated = 0
    for name, payload in config["config"].items():
        if payload.get("use_pickle") is not False:
            raise InputError(f"its tensor {name} is pickled; save the program with plain tensors")
        file = str(payload["path_name"])
        if not re.fullmatch(r"(?:weight|tensor)_\d+", file):
            raise InputError(f"its constant {name} is an object and no tensor")
        numbers = 1
        for size in payload["tensor_meta"]["sizes"]:
            numbers *= size["as_int"]
        data = sizes.get(f"{folder}/{file}", 0)
        if numbers and not data:
            raise InputError(f"the data of its tensor {name} is missing")
        repeated += max(0, numbers - data)
    if repeated > MOST_REPEATED:
        raise InputError(f"its tensors have {repeated:,} numbers more than its data")


def _check_program(program: Any) -> None:
    """Check operators, sizes and types that a serialized program names, else raise InputError."""
    for key, value in _items(program):
        if key == "target" and isinstance(value, str):
            _check_target(value)
        elif key == "expr_str":
            _check_expression(str(value))
        elif key == "range_constraints":
            for expression in value:
                _check_expression(expression)
        elif key in SPECS and isinstance(value, str) and value:
            for inner, kind in _items(json.loads(value)):
                if inner == "type" and kind not in CONTAINERS:
                    raise InputError(f"its inputs or outputs are of type {kind}; use tensors, tuples, lists and dicts")


def _check_target(target: str) -> None:
    """Check that a call's target is an operator of ATen or Sharp that this torch has, else raise InputError."""
    allowed = OPERATORS.fullmatch(target) or ARITHMETIC.fullmatch(target) or target in SUBGRAPHS
    if not allowed or FORBIDDEN.search(target):
        raise InputError(f"it calls {target[:80]!r}, which is no operator of ATen or of Sharp")
    if OPERATORS.fullmatch(target) and not _is_known(*target.split(".")[2:]):
        raise InputError(f"it calls {target[:80]!r}, which torch {torch.__version__} does not have")


def _is_known(library: str, name: str, overload: str) -> bool:
    """Whether torch has this operator on tensors. TorchScript has others below aten, which save files and print."""
    return f"{library}::{name}" + ("" if overload == "default" else f".{overload}") in _known_operators()


def _check_expression(text: str) -> None:
    """Check that the text of a symbolic size is a short expression of symbols and numbers, without large powers.

    Raises:
        InputError: it is something else, which sympy would evaluate.
    """
    powers = text.count("Pow")
    large = len(SMALL_EXPONENT.findall(text)) < powers or powers > MOST_POWERS or LARGE_EXPONENT.search(text)
    if len(text) > 10_000 or large or not EXPRESSION.fullmatch(text):
        raise InputError(f"a size in it is {text[:80]!r}, which is no expression of symbols and numbers")


@cache
def _known_operators() -> frozenset[str]:
    """Return the full names of all operators that torch has, as "aten::add.Tensor"."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def _items(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield every key and value of nested JSON content, at any depth."""
    waiting = [content]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield from one.items()
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's logs, all warnings and all output on stderr inside the context, in the whole process.

    All that matters of torch.export is in the errors that it raises.
    """
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # torch.export prints whole graphs to stderr
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)

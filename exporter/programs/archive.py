"""Reading `.pt2` files: what torch.export.load would execute is refused before torch sees it.

torch.export.load trusts its file. It unpickles weights that say so, and example inputs that are more than tensors; it
looks operators up by any name below `torch`; it evaluates expressions of sizes as Python; and a file that it fails to
read it takes for one of torch 2.7, which is all pickles. So the archive is read here first, by torch's own reader, as
another might see other parts in the same file: no pickle but of tensors, operators of ATen and of Sharp only,
expressions of symbols and numbers only, and no more memory than the file is large.
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
import sharp.plugins.ops.torch_paged_attention  # noqa: F401 - both register ops that a program may call
from sharp.exporter.programs.flat_graph import SUBGRAPH_CALLS
from sharp.plugins.errors import InputError

MOST_PARTS = 2**17
MOST_JSON = 2**28  # bytes
MOST_VALUES = 2**23  # in a part of JSON
MOST_REPEATED = 2**28  # numbers of tensors that are views with more numbers than data
OPERATORS = re.compile(r"torch\.ops\.(?:aten|prims|sharp)\.[a-zA-Z]\w*\.\w+|torch\.ops\.aten\._\w+\.\w+")
FORBIDDEN = re.compile(r"from_file|__|\.(?:data_ptr|set_|set_data|_print)\b")  # files, memory, output
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
MOST_POWERS = 4  # a tower of them takes all memory
SMALL_EXPONENT = re.compile(r",\s*Integer\(-?\d\)\)")
LARGE_EXPONENT = re.compile(r"\*\*\s*(?!\d\b)|\*\*\s*\d\s*\*\*")
CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")
SPECS = ("in_spec", "out_spec")


def load_program(path: Path) -> ExportedProgram:
    """Read a file that torch.export.save wrote.

    Raises:
        InputError: it is damaged, or not of that kind, or holds what would be executed.
    """
    if not path.is_file():  # a pipe or a device need not end
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
        except Exception as error:  # so does torch
            reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
            raise InputError(f"{path} cannot be read by torch {torch.__version__}: {reason}") from error
    program._guards_code = []  # Python that nobody here needs
    return program


def _check(archive: PT2ArchiveReader, length: int) -> None:
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
            torch.load(io.BytesIO(archive.read_bytes(name)), weights_only=True)  # or torch would unpickle it all
    _check_program(_json(archive, models[0], sizes))


def _check_sums(file: IO[bytes], length: int) -> None:
    """The sums of all parts, which torch does not look at: a weight with another byte is as good as any."""
    file.seek(0)
    with zipfile.ZipFile(file) as parts:
        stored = all(one.compress_type == zipfile.ZIP_STORED for one in parts.infolist())
        if not stored or sum(one.file_size for one in parts.infolist()) > length:
            raise InputError("its parts are compressed, or overlap; save the program again")
        damaged = parts.testzip()
    if damaged is not None:
        raise InputError(f"its part {damaged} is damaged; copy or save it again")


def _json(archive: PT2ArchiveReader, name: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    content = archive.read_bytes(name) if sizes[name] <= MOST_JSON else b""
    if not content or sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise InputError(f"its part {name} is {'too large' if sizes[name] else 'empty'}")
    found = json.loads(content)
    if not isinstance(found, dict):
        raise TypeError(name)
    return found


def _check_payload(config: dict[str, Any], folder: str, sizes: Mapping[str, int]) -> None:
    """The tensors of a folder of the archive: each in a file of its own, as plain bytes."""
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
    for key, value in _items(program):
        if key == "target" and isinstance(value, str):
            _check_target(value)
        elif key == "expr_str":
            _check_expression(str(value))
        elif key == "range_constraints":
            for one in value:
                _check_expression(one)
        elif key in SPECS and isinstance(value, str) and value:
            for inner, kind in _items(json.loads(value)):
                if inner == "type" and kind not in CONTAINERS:
                    raise InputError(f"its inputs or outputs are of type {kind}; use tensors, tuples, lists and dicts")


def _check_target(target: str) -> None:
    allowed = OPERATORS.fullmatch(target) or ARITHMETIC.fullmatch(target) or target in SUBGRAPHS
    if not allowed or FORBIDDEN.search(target):
        raise InputError(f"it calls {target[:80]!r}, which is no operator of ATen or of Sharp")
    if OPERATORS.fullmatch(target) and not _is_known(*target.split(".")[2:]):
        raise InputError(f"it calls {target[:80]!r}, which torch {torch.__version__} does not have")


def _is_known(library: str, name: str, overload: str) -> bool:
    """It is an operator on tensors; TorchScript has others below aten, which save files and print."""
    return f"{library}::{name}" + ("" if overload == "default" else f".{overload}") in _known_operators()


def _check_expression(text: str) -> None:
    powers = text.count("Pow")
    large = len(SMALL_EXPONENT.findall(text)) < powers or powers > MOST_POWERS or LARGE_EXPONENT.search(text)
    if len(text) > 10_000 or large or not EXPRESSION.fullmatch(text):
        raise InputError(f"a size in it is {text[:80]!r}, which is no expression of symbols and numbers")


@cache
def _known_operators() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


def _items(content: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value, however deep."""
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
    """Inside, torch.export logs, prints and warns of nothing: what matters of it is in what it raises."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # it prints whole graphs
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)

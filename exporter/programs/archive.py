"""Reading `.pt2` files: what torch.export.load would execute is refused before torch sees it.

torch.export.load trusts its file. It unpickles weights that say so, and example inputs that are more than tensors; it
looks operators up by any name below `torch`; and it evaluates expressions of sizes as Python. So the archive is read
here first: no pickle but of tensors, operators of ATen and of Sharp only, expressions of symbols and numbers only.
"""

import io
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

import sharp.models.normalized_attention
import sharp.plugins.ops.torch_op  # noqa: F401 - both register ops that a program may call
from sharp.exporter.programs.flat_graph import SUBGRAPH_CALLS
from sharp.plugins.errors import InputError

ONE_TENSOR = 2**40  # bytes
JSON_BYTES = 2**28
OPERATORS = re.compile(r"torch\.ops\.(?:aten|prims|sharp)\.[a-zA-Z]\w*\.\w+|torch\.ops\.aten\._\w+\.\w+")
FORBIDDEN = re.compile(r"from_file|__|\.(?:data_ptr|set_)\b")  # files and memory
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
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                _check(archive)
        except InputError as error:
            raise InputError(f"{path} is not loaded: {error}") from error
        except Exception as error:  # zipfile, json and torch's reader of tensors raise almost anything
            raise InputError(f"{path} is not a program of torch.export.save, or is damaged; save it again") from error
        file.seek(0)
        try:
            with quiet():
                program = torch.export.load(file)
        except Exception as error:  # so does torch
            reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
            raise InputError(f"{path} cannot be read by torch {torch.__version__}: {reason}") from error
    program._guards_code = []  # Python that nobody here needs
    return program


def _check(archive: zipfile.ZipFile) -> None:
    names = {name.partition("/")[2]: name for name in archive.namelist()}  # below the archive's own folder
    if len(names) != len(archive.namelist()):
        raise InputError("two of its parts have one name")
    models = [name for name in names if name.startswith("models/")]
    if len(models) != 1:
        raise InputError(f"it holds {len(models)} programs, but must hold one")
    if any(name.startswith("data/aotinductor") or name.endswith((".so", ".py")) for name in names):
        raise InputError("it holds compiled code; save the program itself with torch.export.save")
    for name, full in names.items():
        if archive.getinfo(full).file_size > ONE_TENSOR or archive.getinfo(full).compress_type != zipfile.ZIP_STORED:
            raise InputError(f"its part {name} is compressed or too large")
        if re.fullmatch(r"data/(?:weights|constants)/[^/]*\.pt", name):
            raise InputError("its weights are pickled, by a torch before 2.8; save the program again")
        if re.fullmatch(r"data/(?:weights|constants)/[^/]*_config\.json", name):
            _check_payload(
                _json(archive, full), {one for one in names if one.startswith(name.rpartition("/")[0])}, archive, names
            )
        if name.startswith("data/sample_inputs/"):
            content = archive.read(full)
            if content:
                torch.load(io.BytesIO(content), weights_only=True)  # or torch would unpickle it without a limit
    _check_program(_json(archive, names[models[0]]))


def _json(archive: zipfile.ZipFile, name: str) -> Any:
    if archive.getinfo(name).file_size > JSON_BYTES:
        raise InputError(f"its part {name} is too large")
    return json.loads(archive.read(name))


def _check_payload(config: Any, files: set[str], archive: zipfile.ZipFile, names: dict[str, str]) -> None:
    """The tensors of a folder of the archive: each in a file of its own, as plain bytes."""
    for name, payload in config["config"].items():
        if payload.get("use_pickle") is not False:
            raise InputError(f"its tensor {name} is pickled; save the program with plain tensors")
        file = str(payload["path_name"])
        if not re.fullmatch(r"(?:weight|tensor)_\d+", file):
            raise InputError(f"its constant {name} is an object and no tensor")
        full = next((names[one] for one in files if one.endswith(f"/{file}")), None)
        sizes = [size["as_int"] for size in payload["tensor_meta"]["sizes"]]
        numbers = 1
        for size in sizes:
            numbers *= size
        if full is None or (numbers and not archive.getinfo(full).file_size):
            raise InputError(f"the data of its tensor {name} is missing")


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


def _check_expression(text: str) -> None:
    powers = text.count("Pow")
    large = len(SMALL_EXPONENT.findall(text)) < powers or powers > MOST_POWERS or LARGE_EXPONENT.search(text)
    if len(text) > 10_000 or large or not EXPRESSION.fullmatch(text):
        raise InputError(f"a size in it is {text[:80]!r}, which is no expression of symbols and numbers")


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
    """Inside, torch.export logs and warns of nothing: what matters of it is in what it raises."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)

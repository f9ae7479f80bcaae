"""References to the user's own code, `FILE.py:NAME` or `package.module:NAME`, and the import of that code."""

import ast
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from sharp.core.errors import InputError, NotFoundError, SharpError

SHOWN = 8  # the most names that a message lists
LONGEST = 300  # the most characters of the user's error that a message quotes


@dataclass(frozen=True)
class Reference:
    """A reference to a class or function `name` in `place`, which is a file or the dotted name of a module."""

    place: str
    name: str

    def __str__(self) -> str:
        return f"{self.place}:{self.name}"

    @property
    def file(self) -> Path | None:
        """The file with the code; None if `place` is a module."""
        return Path(self.place) if self.place.endswith(".py") else None

    @property
    def folder(self) -> Path:
        """The folder that the code imports from: above the file's package, or the current folder for a module."""
        if self.file is None:
            return Path.cwd()
        folder = self.file.resolve().parent
        while (folder / "__init__.py").is_file():
            folder = folder.parent
        return folder


def parse_reference(source: Path) -> Reference | None:
    """Read FILE.py:NAME or package.module:NAME; None for a path of another kind.

    Whether a file has the class, and whether a module exists, shows only when `load` imports it.

    Raises:
        InputError: a file of Python is named without the class in it.
        NotFoundError: a file with the suffix .py is named with a class and does not exist.
    """
    text = str(source)
    place, _, name = text.rpartition(":")
    if text.endswith(".py") and source.is_file():
        place, name = text, ""
    elif source.exists():
        return None
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise NotFoundError(f"{place} does not exist; give FILE.py:CLASS")
        if not name.isidentifier():
            raise InputError(
                f"{place} is Python: name the class in it, or a function that makes it, as {_example(place)}"
            )
        return Reference(place, name)
    dotted = place and all(part.isidentifier() for part in place.split("."))
    return Reference(place, name) if dotted and name.isidentifier() else None


def load(reference: Reference) -> tuple[Any, ModuleType]:
    """Import the code, and return the class or function and its module.

    Raises:
        InputError: the import fails, or the module has no class or function of this name.
    """
    with running(reference, f"importing {reference.place}"):
        module = importlib.import_module(reference.place) if reference.file is None else _import_file(reference)
    target = getattr(module, reference.name, None)
    if not callable(target):
        raise InputError(f"{reference.place} has no class or function {reference.name}; {_offered(module)}")
    return target, module


@contextmanager
def running(reference: Reference, what: str) -> Iterator[None]:
    """Run the user's code inside the context.

    The code can import from its folder and prints to stderr. Its errors become a message of one sentence. Errors of
    Sharp (`SharpError`) pass unchanged, and so does KeyboardInterrupt.

    Raises:
        InputError: the code raised an error or called exit; the message begins with `what` and has the file and line.
    """
    folder = str(reference.folder)
    sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):  # stdout may be JSON
            yield
    except SharpError:
        raise
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())[:LONGEST]
        message = f"{what} fails{_line_of(error, folder)}: {type(error).__name__}{': ' if text else ''}{text}"
        raise InputError(message) from error
    finally:
        with suppress(ValueError):
            sys.path.remove(folder)


def callables_of(module: ModuleType, kind: Callable[[Any], bool] = inspect.isclass) -> dict[str, Any]:
    """Return the objects of a `kind` that are defined in a module itself and not imported, by name."""
    return {name: value for name, value in vars(module).items() if kind(value) and value.__module__ == module.__name__}


def _import_file(reference: Reference) -> ModuleType:
    """Import the file of the reference as a module, by its package if it is in one.

    Raises:
        InputError: another module hides it, or its code fails.
    """
    file, folder = Path(reference.place).resolve(), reference.folder
    if folder != file.parent:  # the file is in a package, so it may import other files by relative names
        module = importlib.import_module(".".join(file.relative_to(folder).with_suffix("").parts))
        if Path(str(module.__file__)).resolve() != file:
            raise InputError(f"{file} is hidden by {module.__file__}, which has the same name; rename its package")
        return module
    name = file.stem if file.stem not in sys.modules else f"{file.stem} of {folder}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module in sys.modules
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _line_of(error: BaseException, folder: str) -> str:
    """Return the file and the line of the user's code where an error was raised, for a message."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {Path(error.filename).name} line {error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(folder)]
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    return f" at {Path(own[-1].filename).name} line {own[-1].lineno}" if own else ""


def _offered(module: ModuleType) -> str:
    """Return the words that list the classes and functions of the module, at most `SHOWN`."""
    names = [*callables_of(module), *callables_of(module, inspect.isfunction)]
    return f"it has {', '.join(names[:SHOWN])}" if names else "it defines none"


def _example(place: str) -> str:
    """Return `place`:NAME with the name of the last class in the file `place`, which is parsed but not run.

    NAME is the word CLASS if the file cannot be read or parsed, or has no class at its top level.
    """
    try:
        body = ast.parse(Path(place).read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        body = []
    names = [node.name for node in body if isinstance(node, ast.ClassDef)]
    return f"{place}:{names[-1] if names else 'CLASS'}"

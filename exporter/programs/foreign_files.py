"""Files of other programs, which are recognised by names in the file without unpickling anything."""

import pickletools
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

EXPORT = "sharp export FILE.py:CLASS --weights"
ENTRIES = ("state_dict", "model_state_dict", "model", "module")  # entries of checkpoints in which trainers keep weights
MOST_BYTES = 2**26  # of the pickle, which holds the names of tensors and not their data
MOST_NAMES = 2**20
MOST_PARTS = 2**20
# Names that torch.save writes for tensors, their types and containers. Any other name in a pickle is of code.
PLAIN = re.compile(
    r"torch\._utils\._rebuild_\w+|torch\._tensor\._rebuild\w*|torch\.\w+Storage|torch\.(?:storage\.\w+|Size|device)"
    r"|torch\.(?:u?int|q?u?int|float|bfloat|complex|bool)\w*|torch\.serialization\.\w+|collections\.OrderedDict"
    r"|torch\.nn\.parameter\.Parameter|_codecs\.encode"
)
BEGINNINGS = (
    (b"\x89HDF\r\n\x1a\n", "is an HDF5 file, as Keras writes them"),
    (b"\x93NUMPY", "is an array of NumPy"),
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "is of a torch before 1.6, all pickles"),
    (b"ggml", "is of llama.cpp before GGUF"),
)
SUFFIXES = {
    ".keras": "is a Keras model",
    ".h5": "is a Keras model",
    ".pb": "is a graph of TensorFlow",
    ".tflite": "is a model of TensorFlow Lite",
    ".index": "is a checkpoint of TensorFlow",
    ".msgpack": "is a checkpoint of Flax",
    ".onnx": "is an ONNX model, which has no attention that Sharp could find",
    ".engine": "is an engine of TensorRT",
    ".plan": "is an engine of TensorRT",
    ".mlmodel": "is a model of Core ML",
    ".nemo": "is an archive of NeMo",
    ".mar": "is an archive of TorchServe",
    ".pkl": "is a pickle, which Sharp does not run",
    ".pickle": "is a pickle, which Sharp does not run",
    ".npz": "is an archive of NumPy",
}
PYTORCH = "Sharp reads PyTorch's weights with their class, Hugging Face folders, GGUF and programs of torch.export"


@dataclass(frozen=True)
class PickleNames:
    """The names in the pickle of a file of torch.save.

    `code` are the classes and functions in order, `texts` all strings.
    """

    code: tuple[str, ...]
    texts: frozenset[str]

    @property
    def foreign(self) -> list[str]:
        """The classes and functions that torch.save does not write for plain tensors."""
        return [name for name in self.code if not PLAIN.fullmatch(name)]


def owner_of(path: Path) -> str | None:
    """Return a sentence on what a file or folder of another program is and how its model is exported.

    None if the file or folder is not recognised, is missing or cannot be read, or holds plain tensors of torch.save.
    """
    if path.is_dir():
        return _other(path, "is a model of TensorFlow") if (path / "saved_model.pb").is_file() else None
    try:
        with path.open("rb") as file:
            beginning = file.read(32)
        if beginning.startswith(b"PK") and zipfile.is_zipfile(path):
            return _owner_of_archive(path)
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError):
        return None
    for start, what in BEGINNINGS:
        if beginning.startswith(start):
            return _old(path) if "torch" in what else _other(path, what)
    if beginning[4:8] == b"TFL3":
        return _other(path, SUFFIXES[".tflite"])
    return _other(path, SUFFIXES[path.suffix]) if path.suffix in SUFFIXES else None


def pickle_names(path: Path) -> PickleNames | None:
    """Read the names in the pickle of a file of torch.save, which is not run.

    None if the file cannot be read, is of a torch before 1.6, damaged or of another kind, or its pickle is too large.
    """
    texts: set[str] = set()
    code: dict[str, None] = {}
    last = ["", ""]
    try:
        with zipfile.ZipFile(path) as archive:
            pickles = [part for part in archive.infolist() if part.filename.endswith("/data.pkl")]
            if len(pickles) != 1 or pickles[0].file_size > MOST_BYTES:
                return None
            for operation, argument, _ in pickletools.genops(archive.read(pickles[0])):
                if operation.name == "GLOBAL":
                    code[str(argument).replace(" ", ".")] = None
                elif operation.name == "STACK_GLOBAL":
                    code[".".join(last)] = None
                elif isinstance(argument, str) and len(texts) < MOST_NAMES:
                    texts.add(argument)
                    last = [last[1], argument]
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError):
        return None
    return PickleNames(tuple(code), frozenset(texts))


def _owner_of_archive(path: Path) -> str | None:
    """Return the message for a zip file of TorchScript, AOTInductor, Keras, ...; None for any other zip file."""
    with zipfile.ZipFile(path) as archive:
        parts = archive.namelist()[:MOST_PARTS]
    if any(part.endswith("/constants.pkl") for part in parts) and any("/code/" in part for part in parts):
        return (
            f"{path} is TorchScript, which is compiled code: export the class that made it, {EXPORT} WEIGHTS.pt, with "
            f"the weights of torch.save(torch.jit.load({path.name!r}).state_dict(), 'WEIGHTS.pt')"
        )
    if any("data/aotinductor/" in part for part in parts):
        return (
            f"{path} is a package of AOTInductor, which is compiled code for one machine: export the program that it "
            "was compiled from, as torch.export.save writes it, or the class: sharp export FILE.py:CLASS"
        )
    if "model.weights.h5" in parts:
        return _other(path, SUFFIXES[".keras"])
    if parts and all(part.endswith(".npy") for part in parts):
        return _other(path, SUFFIXES[".npz"])
    if any(part.rpartition("models/")[2] == "model.json" for part in parts) and path.suffix != ".pt2":
        return f"{path} is a program of torch.export.save, which has the suffix .pt2: rename it"
    names = pickle_names(path)
    return None if names is None else _owner_of_pickle(path, names)


def _owner_of_pickle(path: Path, names: PickleNames) -> str | None:
    """Return the message for a pickle with objects other than weights; None if it has only weights."""
    if not (foreign := names.foreign):
        return None
    load = f"torch.load({path.name!r}, weights_only=False)"
    if {"_modules", "_parameters"} <= names.texts:
        return (
            f"{path} is a whole pickled module ({foreign[0]}), whose code Sharp does not run: export its class, "
            f"{EXPORT} WEIGHTS.pt, with the weights of torch.save({load}.state_dict(), 'WEIGHTS.pt'), if you trust it"
        )
    entry = next((name for name in ENTRIES if name in names.texts), ENTRIES[0])
    return (
        f"{path} holds objects beside its weights ({', '.join(foreign[:3])}), which Sharp does not unpickle: save the "
        f"weights alone, torch.save({load}[{entry!r}], 'WEIGHTS.pt'), if you trust it, then {EXPORT} WEIGHTS.pt"
    )


def _old(path: Path) -> str:
    """Return the message for a file of torch before 1.6."""
    return (
        f"{path} is of a torch before 1.6 and all pickles: load it there, if you trust it, and save it again with "
        "torch.save(state_dict, 'WEIGHTS.pt')"
    )


def _other(path: Path, what: str) -> str:
    """Return the message for a file that is not PyTorch's; `what` follows the file's name, as "is an ONNX model"."""
    return f"{path} {what}; {PYTORCH}: convert it to one of them"

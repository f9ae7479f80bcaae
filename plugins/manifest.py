"""`sharp.json`, the manifest of a model folder: where the exporter and the server meet."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import NotRequired, TypedDict  # noqa: UP035  # pydantic refuses typing's before Python 3.12

from sharp.plugins.custom.normalizer import NAME
from sharp.plugins.errors import InputError, NotFoundError
from sharp.plugins.external_data import check_external_data, is_there, lies_inside
from sharp.plugins.ops.attributes import NORMALIZERS, SCALED_CACHES

MANIFEST_FILE = "sharp.json"
FORMAT_VERSION = "1.12"

NormalizerName = Literal["softmax", "adaptive_softmax", "entmax", "ssa", "sigmoid", "relu", "relu2", "softpick"]
CustomName = Annotated[str, Field(pattern=f"^{NAME}$", description="of a user's file; the graph has its standard ops")]
ModelKind = Literal["decoder", "encoder", "set", "numbers", "module"]
Target = Literal["onnxruntime", "tensorrt", "portable"]
CacheForm = Literal["paged", "contiguous", "none"]
Dtype = Literal["float32", "float16", "bfloat16"]
CacheDtype = Literal["float32", "float16", "bfloat16", "int8", "fp8"]
Quantization = Literal["int8", "int4", "int4-128"]
PositionScheme = Literal["none", "rope", "alibi", "nape", "learned"]
Pooling = Literal["mean", "cls", "last"]
Activation = Literal["sigmoid", "softmax", "identity"]
NormValue = int | float | tuple[float, ...] | None
# The protocol's fields have 32 bits, and numpy no larger ones than 64: a larger number is damage.
Positive = Annotated[int, Field(gt=0, lt=2**31)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Frozen(BaseModel):
    # protected_namespaces: `model_file` is our field, not one of pydantic's own `model_*` methods.
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class _Version(_Frozen):
    # Read by itself: another major version may differ in every other field.
    format_version: str


class SourceRecord(_Frozen):
    """What the model was made from; `task` is what the checkpoint was trained for, where it says so.

    `task_parameters` are those of the task's parameters in which the training differed from its defaults.
    """

    name: str
    architecture: str
    sha256: str
    task: str | None = None
    task_parameters: dict[str, bool | int | float | str] = {}


class NormParameter(_Frozen):
    """One parameter of the norm; `value` is None where every head has learned its own."""

    name: str
    value: NormValue
    origin: Literal["checkpoint", "option", "default"]


class HeadNorm(_Frozen):
    """Another norm than the model's for some query heads of a layer."""

    layer: int
    heads: tuple[int, ...]
    name: str
    normalizer: NormalizerName | CustomName
    alpha: float
    temperature_coefficients: tuple[float, ...]
    entropy_threshold: float
    temperature: float
    parameters: tuple[NormParameter, ...] = ()


class Norm(_Frozen):
    """The attention scheme (`--norm`) and the kernel normalizer that it lowers to."""

    name: str
    normalizer: NormalizerName | CustomName
    trained: bool = Field(description="the checkpoint was trained with this norm")
    alpha: float = 1.5
    temperature_coefficients: tuple[float, ...] = ()
    entropy_threshold: float = 0.5
    temperature: float = Field(1.0, description="of norm fixed-temperature; the graph's `scale` contains it")
    log_length_offset: int = 2
    parameters: tuple[NormParameter, ...] = Field((), description="what the norm is set up with, and by whom")
    heads: tuple[HeadNorm, ...] = ()  # those that have another norm, layer by layer


class Cache(_Frozen):
    """The key-value cache that the graph reads and writes; `block_size` and `dtype` matter where there is one."""

    form: CacheForm = "paged"
    block_size: Positive = 16
    dtype: CacheDtype = "float32"
    # KV heads of every cache; empty where each layer has one with all of the model's.
    heads: tuple[Positive, ...] = ()
    # Numbers of the caches that have a key screen (op input key_screen), a copy of the keys in 8 bits.
    key_screens: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @property
    def beside(self) -> tuple[str, ...]:
        """The tensors [blocks, kv_heads] that every layer has beside its two caches, and cannot do without."""
        return ("key_scale", "value_scale") if self.dtype in SCALED_CACHES else ()


class Port(_Frozen):
    """An input or output of the graph; a dimension is a number, or the name of one that varies."""

    name: str
    dtype: Literal["float32", "float16", "bfloat16", "int64", "int32", "bool"]
    shape: tuple[str | int, ...]
    doc: str = ""


class Tokenizer(_Frozen):
    """The tokenizer's file inside the folder, if there is one, and the token ids that the server needs."""

    file: str | None = "tokenizer.json"
    bos_token_id: TokenId | None = None
    eos_token_ids: tuple[TokenId, ...] = ()
    token_types: Annotated[bool, Field(description="the model reads which text of a pair a token is from, 0 or 1")] = (
        False
    )


class Sampling(_Frozen):
    """Defaults of parameters that a request leaves out, from the checkpoint's `generation_config.json`; None: none."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None


class Embedding(_Frozen):
    """How the hidden states of an encoder become the embedding of a text, from sentence-transformers' own files.

    With `matryoshka` its first dimensions are an embedding, too: any number of them, or one of `matryoshka_dimensions`.
    """

    size: Positive
    pooling: Annotated[Pooling, Field(description="of all tokens, the first or the last")] = "mean"
    normalize: Annotated[bool, Field(description="to length 1")] = False
    matryoshka: bool = False
    matryoshka_dimensions: tuple[Positive, ...] = ()


class Classification(_Frozen):
    """What the logits of an encoder with a classification head stand for, and what makes scores of them."""

    labels: Annotated[tuple[str, ...], Field(min_length=1)]
    activation: Activation


class FileSum(_Frozen):
    """What a file of the folder was when it was written."""

    size: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Compared(TypedDict):
    """The largest differences from PyTorch in one case on one runtime, and what they may be.

    Logits relative to the largest logit of the case, entropies in nats; null where they are not finite.
    """

    runtime: str
    case: str
    rows: int
    logits_error: float | None
    logits_tolerance: NotRequired[float]
    entropy_error: float | None
    entropy_tolerance: NotRequired[float]
    same_greedy: int


class GreedyCompletion(TypedDict):
    """How many tokens of a runtime's greedy completion PyTorch also generates."""

    runtime: str
    tokens: int
    same: int


class TextPerplexity(TypedDict):
    """Perplexity of a text in PyTorch, with the trained norm and with the exported one, and by runtime."""

    text: str
    tokens: int
    trained_norm: str
    norm: str
    before: float | None
    after: float | None
    runtimes: NotRequired[dict[str, float | None]]


class VerificationSummary(TypedDict, total=False):
    """What verification found, in short; `report.json` has all of it."""

    passed: bool
    comparisons: list[Compared]
    greedy: list[GreedyCompletion]
    perplexity: TextPerplexity | None


class Manifest(_Frozen):
    """Everything that a runtime must know about an exported model besides the graph itself."""

    format_version: str = FORMAT_VERSION
    sharp_version: str
    name: str
    kind: ModelKind = Field(
        "decoder", description="over tokens, or over numbers; `set` asks one query about a set; `module` is any other"
    )
    source: SourceRecord
    model_file: str = Field("model.onnx", min_length=1)
    dtype: Dtype = Field("float32", description="of weights and activations; logits are float32")
    quantization: Quantization | None = Field(None, description="of the weights of matrix products and embeddings")
    opset: Positive
    layers: Annotated[int, Field(gt=0, le=10_000)]  # a server describes each before it opens the graph
    q_heads: Positive
    kv_heads: Positive
    head_dim: Positive
    value_dim: Positive
    vocab_size: Positive = Field(
        description="size of the output at a position, logits of tokens or of classes; with embedding or "
        "classification, of the embeddings of tokens"
    )
    max_context: Positive = Field(description="tokens of prompt and completion together that the server accepts")
    trained_context: Positive
    positions: PositionScheme
    windows: tuple[Positive, ...] = Field(
        (), description="keys that a query of each layer sees at most, max_context where all; empty: all in every layer"
    )
    norm: Norm
    stats_columns: Literal[4, 5] = Field(
        4, description="of the output stats: entropy, support, inverse temperature, logit spread, and the sink's mass"
    )
    target: Target = Field(
        "onnxruntime",
        description="attention is a node, for onnxruntime with its function body too; portable has standard ops only",
    )
    cache: Cache = Cache()
    inputs: tuple[Port, ...] = Field((), description="of the graph, in order; those of a paged model are the design's")
    outputs: tuple[Port, ...] = ()
    tokenizer: Tokenizer = Tokenizer(file=None)
    sampling: Sampling = Sampling()
    embedding: Embedding | None = Field(None, description="of an encoder whose output is hidden_states")
    classification: Classification | None = Field(None, description="of an encoder whose logits are of a text")
    tools: dict[str, str] = {}
    verified: bool = Field(True, description="false: a check failed, and runtimes refuse it unless told otherwise")
    verification: VerificationSummary = {}
    files: dict[str, FileSum] = Field(
        default_factory=dict, description="of all other files, by their paths in the folder"
    )

    def write(self, folder: Path) -> None:
        """Write `sharp.json` into `folder`, complete or not at all."""
        partial = folder / f"{MANIFEST_FILE}.partial"
        partial.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / MANIFEST_FILE)


def read_manifest(folder: Path, *, check_files: bool = True) -> Manifest:
    """Read and check `folder/sharp.json`; `check_files`: and that the files that it names are there and fit.

    Raises:
        NotFoundError: the folder or its manifest does not exist.
        InputError: the manifest is not valid, is of a newer major version, or names a file outside the folder;
            or the model keeps its weights outside the folder, or where they do not fit.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise NotFoundError(f"{folder} is not a model folder: it has no {MANIFEST_FILE}; make one with sharp-export")
    try:
        content = path.read_bytes()
        _check_version(path, _Version.model_validate_json(content).format_version)
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(f"{path} is not a valid manifest: {field}: {first['msg']}") from error
    if manifest.q_heads % manifest.kv_heads:
        raise InputError(
            f"{path} is not a valid manifest: q_heads is {manifest.q_heads}, but must be a multiple of kv_heads "
            f"({manifest.kv_heads})"
        )
    foreign = {manifest.norm.normalizer, *(one.normalizer for one in manifest.norm.heads)}.difference(NORMALIZERS)
    if foreign and manifest.target != "portable":
        raise InputError(
            f"{path} is not a valid manifest: norm.normalizer is {min(foreign)!r}, which no kernel has, and target is "
            f"{manifest.target!r}; it must be one of {', '.join(NORMALIZERS)}, or the target portable"
        )
    if len(manifest.windows) not in (0, manifest.layers):
        raise InputError(
            f"{path} is not a valid manifest: windows has {len(manifest.windows)} of {manifest.layers} layers"
        )
    if not check_files:
        return manifest
    for name in filter(None, (manifest.model_file, manifest.tokenizer.file)):
        if not lies_inside(folder, name):
            raise InputError(f"{path} names {name!r:.300}, which is outside the model folder")
        if not is_there(folder / name):
            raise InputError(f"{folder} is incomplete: {name!r:.300} is missing; export the model again")
    check_external_data(folder, manifest.model_file)
    return manifest


def check_verified(folder: Path, manifest: Manifest, allow_unverified: bool) -> None:
    """Refuse a model that failed its verification, unless the user allows it.

    Raises:
        InputError: it failed, and is not allowed.
    """
    if not (manifest.verified or allow_unverified):
        raise InputError(
            f"{folder} failed its verification, so its output may be wrong (report.json says where); export it again, "
            "or allow it with --allow-unverified"
        )


def _check_version(path: Path, version: str) -> None:
    if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise InputError(
            f"{path} has format version {version}, this Sharp reads {FORMAT_VERSION}; "
            "upgrade Sharp or export the model again"
        )

"""`sharp.json`, the manifest of a model folder, which the exporter writes and the server reads."""

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema
from typing_extensions import NotRequired, TypedDict  # noqa: UP035  # pydantic refuses typing's before Python 3.12

from sharp.core.errors import InputError, NotFoundError
from sharp.core.external_data import check_external_data, is_there, lies_inside
from sharp.core.regular_file import read_regular_file
from sharp.core.vocabulary import check_special_tokens
from sharp.plugins.op.attributes import NORMALIZERS
from sharp.plugins.op.definition import CUSTOM_NAME, SCALED_CACHES

MANIFEST_FILE = "sharp.json"
MOST_MANIFEST_BYTES = 2**24
FORMAT_VERSION = "1.13"

VERSION_DIGITS = 12

NormalizerName = Annotated[str, WithJsonSchema({"enum": [*NORMALIZERS], "type": "string"})]
CustomName = Annotated[
    str, Field(pattern=f"^{CUSTOM_NAME}$", description="of a user's file; the graph has its standard ops")
]
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
# The protocol's fields have 32 bits and numpy's integers 64, so a larger number is damage.
Positive = Annotated[int, Field(gt=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Frozen(BaseModel):
    # protected_namespaces: `model_file` is our field, not one of pydantic's own `model_*` methods.
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class _Version(_Frozen):
    # The version is read by itself, because another major version may differ in every other field.
    format_version: str


class SourceRecord(_Frozen):
    """The checkpoint from which the model was exported, and the task that it was trained for, if it names one.

    `task_parameters` are the parameters of the task in which the training differed from the task's defaults.
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
    """Another norm than the model's for some query heads (from 0) of a layer; other fields are as in `Norm`."""

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
    """The attention scheme (`--norm`) and the kernel normalizer that it lowers to.

    `alpha` is for entmax, `temperature_coefficients` and `entropy_threshold` for adaptive temperature, and
    `log_length_offset` for length scales; others ignore them. `heads` are the heads with another norm than this, layer
    by layer.
    """

    name: str
    normalizer: NormalizerName | CustomName
    trained: bool = Field(description="the checkpoint was trained with this norm")
    alpha: float = 1.5
    temperature_coefficients: tuple[float, ...] = ()
    entropy_threshold: float = 0.5
    temperature: float = Field(1.0, description="of norm fixed-temperature; the graph's `scale` contains it")
    log_length_offset: int = 2
    parameters: tuple[NormParameter, ...] = Field((), description="what the norm is set up with, and by whom")
    heads: tuple[HeadNorm, ...] = ()


class Cache(_Frozen):
    """The key-value cache that the graph reads and writes; `block_size` and `dtype` matter where there is one.

    `heads` are the KV heads of every cache; empty if each layer has one cache with all KV heads of the model.
    `key_screens` are the numbers of the caches that have a key screen (op input key_screen), a copy of the keys in 8
    bits.
    """

    form: CacheForm = "paged"
    block_size: Positive = 16
    dtype: CacheDtype = "float32"
    heads: tuple[Positive, ...] = ()
    key_screens: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @property
    def beside(self) -> tuple[str, ...]:
        """The names of the tensors [blocks, kv_heads] that every layer has beside its caches; empty without scales."""
        return ("key_scale", "value_scale") if self.dtype in SCALED_CACHES else ()


class Port(_Frozen):
    """An input or output of the graph; a dimension is a number, or the name of one that varies."""

    name: str
    dtype: Literal["float32", "float16", "bfloat16", "int64", "int32", "bool"]
    shape: tuple[str | int, ...]
    doc: str = ""


class TokenizerSettings(_Frozen):
    """The tokenizer's file inside the folder, if there is one, and the token ids that the server needs."""

    file: str | None = "tokenizer.json"
    bos_token_id: TokenId | None = None
    eos_token_ids: tuple[TokenId, ...] = ()
    token_types: Annotated[bool, Field(description="the model reads which text of a pair a token is from, 0 or 1")] = (
        False
    )


class SamplingDefaults(_Frozen):
    """Defaults of parameters that a request leaves out, as the checkpoint or the user recommends them; None: none."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None


class Embedding(_Frozen):
    """The steps from the hidden states of an encoder to the embedding of a text, from sentence-transformers' files.

    With `matryoshka` the first dimensions of an embedding are an embedding, too: any number of them, or one of
    `matryoshka_dimensions`.
    """

    size: Positive
    pooling: Annotated[Pooling, Field(description="of all tokens, the first or the last")] = "mean"
    normalize: Annotated[bool, Field(description="to length 1")] = False
    matryoshka: bool = False
    matryoshka_dimensions: tuple[Positive, ...] = ()


class Classification(_Frozen):
    """The labels of the logits of a classification head, and the activation that turns logits into scores."""

    labels: Annotated[tuple[str, ...], Field(min_length=1)]
    activation: Activation


class FileSum(_Frozen):
    """The size and the hash of a file of the model folder when the export wrote it."""

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
    """The number of tokens of a runtime's greedy completion that PyTorch generates, too."""

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
    """A summary of the verification; `report.json` has all of its numbers."""

    passed: bool
    comparisons: list[Compared]
    greedy: list[GreedyCompletion]
    perplexity: TextPerplexity | None


class ExpectedEntropy(_Frozen):
    """The mean entropy / ln(visible keys) of every head in PyTorch, by context length; a server compares its own.

    A range of contexts ends at its bound and begins after the half of that; texts had `tokens` tokens in each.
    """

    text: str = Field(description="the file that was read, or `random tokens`")
    contexts: tuple[Positive, ...] = Field(min_length=1, description="upper bounds of the ranges, doubling")
    tokens: tuple[Positive, ...]
    normalized_entropy: tuple[tuple[tuple[Finite, ...], ...], ...] = Field(description="[layers][heads][ranges]")

    def shape_is(self, layers: int, heads: int) -> bool:
        """Whether `normalized_entropy` has a number for every layer, head and range."""
        ranges = len(self.contexts)
        return (
            (len(self.tokens), len(self.normalized_entropy)) == (ranges, layers)
            and all(len(layer) == heads for layer in self.normalized_entropy)
            and all(len(head) == ranges for layer in self.normalized_entropy for head in layer)
        )


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
    layers: Annotated[int, Field(gt=0, le=10_000)]  # a server describes each layer before it opens the graph
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
    tokenizer: TokenizerSettings = TokenizerSettings(file=None)
    sampling: SamplingDefaults = SamplingDefaults()
    sampling_source: str | None = Field(None, description="where the values of `sampling` came from, for people")
    embedding: Embedding | None = Field(None, description="of an encoder whose output is hidden_states")
    classification: Classification | None = Field(None, description="of an encoder whose logits are of a text")
    tools: dict[str, str] = {}
    verified: bool = Field(True, description="false: a check failed, and runtimes refuse it unless told otherwise")
    verification: VerificationSummary = {}
    expected_entropy: ExpectedEntropy | None = Field(None, description="of a decoder; null where it is not known")
    files: dict[str, FileSum] = Field(
        default_factory=dict, description="of all other files, by their paths in the folder"
    )

    def write(self, folder: Path) -> None:
        """Write `sharp.json` into `folder`, which must exist, as a whole or not at all."""
        partial = folder / f"{MANIFEST_FILE}.partial"
        partial.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / MANIFEST_FILE)


def read_manifest(folder: Path, *, check_files: bool = True) -> Manifest:
    """Read and check `folder/sharp.json`; with `check_files`, also check that its files exist and fit.

    Raises:
        NotFoundError: the folder or its manifest does not exist.
        InputError: the manifest is not valid, is of another major version, or has a special token outside the
            vocabulary; with `check_files`, also: the file of the model or the tokenizer is missing or outside the
            folder, or the model's weights are outside the folder or do not fit into their files.
    """
    path = folder / MANIFEST_FILE
    if not folder.exists():
        raise NotFoundError(f"there is no folder {folder}; give a model folder, which sharp-export makes")
    if not path.is_file():
        raise NotFoundError(f"{folder} is not a model folder: it has no {MANIFEST_FILE}; make one with sharp-export")
    try:
        content = read_regular_file(path, MOST_MANIFEST_BYTES)
        _check_version(path, _Version.model_validate_json(content).format_version)
        manifest = Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(f"{path} is not a valid manifest: {field}: {first['msg']}; export it again") from error
    if manifest.q_heads % manifest.kv_heads:
        raise InputError(
            f"{path} is not a valid manifest: q_heads is {manifest.q_heads}, but must be a multiple of kv_heads "
            f"({manifest.kv_heads})"
        )
    foreign = {manifest.norm.normalizer, *(group.normalizer for group in manifest.norm.heads)}.difference(NORMALIZERS)
    if foreign and manifest.target != "portable":
        raise InputError(
            f"{path} is not a valid manifest: norm.normalizer is {min(foreign)!r}, which no kernel has, and target is "
            f"{manifest.target!r}; it must be one of {', '.join(NORMALIZERS)}, or the target portable"
        )
    if len(manifest.windows) not in (0, manifest.layers):
        raise InputError(
            f"{path} is not a valid manifest: windows has {len(manifest.windows)} of {manifest.layers} layers"
        )
    tokens = manifest.tokenizer
    check_special_tokens(
        f"{path} is not a valid manifest", manifest.vocab_size, tokens.bos_token_id, tokens.eos_token_ids
    )
    expected = manifest.expected_entropy
    if expected is not None and not expected.shape_is(manifest.layers, manifest.q_heads):
        raise InputError(
            f"{path} is not a valid manifest: expected_entropy must have a number for each of {manifest.layers} "
            f"layers, {manifest.q_heads} heads and {len(expected.contexts)} ranges"
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


def model_version(folder: Path) -> str:
    """Return the first 12 hexadecimal digits of the SHA-256 of `folder/sharp.json`, which contains all files' sums.

    Raises:
        InputError: the manifest is no regular file, or is too large.
        FileNotFoundError: the manifest does not exist.
    """
    return _manifest_sha256(folder)[:VERSION_DIGITS]


def check_model_version(folder: Path, version: str) -> None:
    """Refuse a model folder whose version does not begin with `version`; an empty `version` allows any.

    Raises:
        InputError: the folder has another version, or the manifest is no regular file, or is too large.
        FileNotFoundError: the manifest does not exist.
    """
    if version and not (found := _manifest_sha256(folder)).startswith(version):
        raise InputError(
            f"{folder} has the version {found[: len(version)]}, not {version}; change model_version, or bring the "
            "model of that version"
        )


def _manifest_sha256(folder: Path) -> str:
    """Return the SHA-256 of the folder's manifest file as hexadecimal digits."""
    return hashlib.sha256(read_regular_file(folder / MANIFEST_FILE, MOST_MANIFEST_BYTES)).hexdigest()


def check_verified(folder: Path, manifest: Manifest, allow_unverified: bool) -> None:
    """Refuse a model that failed its verification, unless the user allows it.

    Raises:
        InputError: the model failed its verification and is not allowed.
    """
    if not (manifest.verified or allow_unverified):
        raise InputError(
            f"{folder} failed its verification, so its output may be wrong (report.json says where); export it again, "
            "or allow it with --allow-unverified"
        )


def _check_version(path: Path, version: str) -> None:
    """Check that this Sharp reads manifests of `version` ("major.minor"): the major numbers must be equal.

    Raises:
        InputError: the major number differs; the message names `path`, the manifest.
    """
    if version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise InputError(
            f"{path} has format version {version}, this Sharp reads {FORMAT_VERSION}; "
            "upgrade Sharp or export the model again"
        )

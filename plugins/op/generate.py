"""The generator of files from the ops' definition, for other languages and readers; `--check` fails if one is stale.

python -m sharp.plugins.op.generate [--check]
"""

import math
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from sharp.core.manifest_schema import SCHEMA_FILE, manifest_schema
from sharp.plugins.op.c_layout import Field, attribute_fields, call_fields
from sharp.plugins.op.definition import (
    ATTENTION,
    ATTRIBUTES,
    ICML2025_COEFFICIENTS,
    MOST_COEFFICIENTS,
    NORMALIZERS,
    PAGED_ATTENTION,
    TYPES,
    OpDefinition,
    Parameter,
)

HERE = Path(__file__).parent
HEADER_FILE = HERE / "sharp_op.h"
CONTRACT_FILE = HERE.parents[1] / "docs" / "contract.md"
TENSOR_TYPES = {
    "T": "kT",
    "C": "kC",
    "tensor(float)": "kFloat",
    "tensor(int32)": "kInt32",
    "tensor(int8)": "kInt8",
    "tensor(bool)": "kBool",
}
STRUCTS = {PAGED_ATTENTION: ("SharpPagedAttention", "Paged"), ATTENTION: ("SharpAttention", "Contiguous")}

_HEADER = """\
/* Generated from plugins/op/definition.py by `python -m sharp.plugins.op.generate`: do not edit.
 *
 * The ops in C: numbers of types and normalizers, a call of each op; and in C++ the tables that check.cc and the
 * adapters of the runtimes go through.
 */
#ifndef SHARP_OP_H
#define SHARP_OP_H

#include <stdint.h>

{types}

{normalizers}

enum {{ SHARP_MAX_TEMPERATURE_TERMS = {most_coefficients} }};

/* Attributes that are one number: kernels may have arguments of these names. */
#define SHARP_ATTRIBUTE_ARGUMENTS(X) {attribute_arguments}

{structs}

#ifdef __cplusplus
#include <cstddef>
#include <limits>

namespace sharp {{

constexpr double kInfinite = std::numeric_limits<double>::infinity();

struct NormalizerDefinition {{
  const char* name;
  int64_t columns;  // of head_params, its own
  const char* column_names[2];
  bool positive;       // its columns are above 0
  bool competes;       // weights are divided by their sum: there may be a sink, and own columns are needed
  bool sparse;         // a visible key can have the weight 0
  int64_t passes;      // sets of sums; more than 1: a weight is known only after a pass over all logits
}};
constexpr NormalizerDefinition kNormalizers[] = {{
{normalizer_rows}
}};

enum class AttributeType {{ kFloat, kInt, kString, kFloats }};
struct AttributeDefinition {{
  const char* name;
  AttributeType type;
  size_t offset;    // in SharpAttributes
  double fallback;  // NaN: every node has it
}};
constexpr AttributeDefinition kAttributes[] = {{
{attribute_rows}
}};
constexpr float kDefaultCoefficients[] = {{{coefficients}}};

// What an attribute must be; the offset is that of kAttributes.
struct LimitsDefinition {{
  int attribute;   // in kAttributes
  int normalizer;  // whose calls are checked; -1: all
  bool gpu;        // only calls on a GPU are checked
  double least, most;
  bool open, infinite;  // without `least`; with infinity
  const char* rule;
}};
constexpr LimitsDefinition kLimits[] = {{
{limit_rows}
}};

constexpr const char* kTypeNames[] = {{{type_names}}};

enum class TensorType {{ kT, kC, kFloat, kInt32, kInt8, kBool }};

// A dimension: a size of the call and a number; size -1: screen_bytes.
struct Dimension {{
  int size, plus;
}};
struct ParameterDefinition {{
  const char* name;
  TensorType type;
  int rank;  // -1: any
  Dimension dimensions[4];
  const char* shape;
  bool optional;
  size_t buffer;  // of the struct of a call
  int64_t flag;   // of the struct, -1: none
}};
struct OutputDefinition {{
  const char* name;
  TensorType type;
  bool optional;
  int in_place;  // the input whose memory it may take, -1: none
}};
{ops}

}}  // namespace sharp
#endif

#endif
"""

_OP = """
struct {tables} {{
  using Call = {struct};
  static constexpr const char* kName = "{op}";
  enum Input {{ {inputs}, kInputCount }};
  enum Output {{ {outputs}, kOutputCount }};
  static constexpr size_t kSizes[] = {{{offsets}}};
  static constexpr const char* kSizeNames[] = {{{sizes}}};
  static constexpr ParameterDefinition kInputs[] = {{
{rows}
  }};
  static constexpr OutputDefinition kOutputs[] = {{
{output_rows}
  }};
}};"""


def header() -> str:
    """Return the text of `sharp_op.h`, not yet formatted."""
    enum = ", ".join(f"SHARP_{'FP8' if name == 'fp8' else name.upper()}" for name in TYPES)
    normalizers = ", ".join(f"SHARP_{normalizer.name.upper()} = {normalizer.code}" for normalizer in NORMALIZERS)
    structs = [_struct("SharpAttributes", attribute_fields())]
    for op, (name, _) in STRUCTS.items():
        doc = f"/* One call of {op.name}. Sizes are known to the host; buffers lie where the kernels run. */\n"
        structs.append(doc + _struct(name, call_fields(op)))
    native = [attribute for attribute in ATTRIBUTES if attribute.native]
    return _HEADER.format(
        types=f"typedef enum {{ {enum} }} SharpType; /* FP8: e4m3 */",
        normalizers=f"typedef enum {{ {normalizers} }} SharpNormalizer;",
        most_coefficients=MOST_COEFFICIENTS,
        attribute_arguments=" ".join(
            f"X({attribute.name})" for attribute in native if attribute.type in ("float", "int")
        ),
        structs="\n\n".join(structs),
        normalizer_rows="\n".join(
            f'    {{"{normalizer.name}", {len(normalizer.columns)}, '
            f"{{{', '.join(_quoted(c.name) for c in normalizer.columns)}}}, "
            f"{_bool(any(c.positive for c in normalizer.columns))}, {_bool(normalizer.competes)}, "
            f"{_bool(normalizer.sparse)}, {normalizer.passes}}},"
            for normalizer in sorted(NORMALIZERS, key=lambda normalizer: normalizer.code)
        ),
        attribute_rows="\n".join(
            f'    {{"{attribute.name}", AttributeType::k{attribute.type.capitalize()}, '
            f"offsetof(SharpAttributes, {attribute.name}), "
            f"{_number(attribute.default if isinstance(attribute.default, int | float) else math.nan)}}},"
            for attribute in native
        ),
        coefficients=", ".join(f"{number}f" for number in ICML2025_COEFFICIENTS),
        limit_rows="\n".join(
            f"    {{{index}, {f'SHARP_{limits.normalizer.upper()}' if limits.normalizer else -1}, {_bool(limits.gpu)}, "
            f"{_number(limits.least)}, {_number(limits.most)}, {_bool(limits.open)}, {_bool(limits.infinite)}, "
            f"{_quoted(limits.rule)}}},"
            for index, attribute in enumerate(native)
            for limits in attribute.limits
        ),
        type_names=", ".join(map(_quoted, TYPES)),
        ops="\n".join(_op(op) for op in STRUCTS),
    )


def _struct(name: str, fields: Iterator[Field]) -> str:
    """Return the C definition of a struct, with each field's comment above it."""
    lines = []
    for field in fields:
        if field.comment:
            text = textwrap.wrap(field.comment, 110)
            lines.append("  /* " + "\n   * ".join(text) + " */")
        lines.append(f"  {field.declaration}")
    return "typedef struct {\n" + "\n".join(lines) + f"\n}} {name};"


def _op(op: OpDefinition) -> str:
    """Return the C++ tables of an op: its inputs, outputs, aliases and where each stands in the C struct."""
    struct, tables = STRUCTS[op]
    names = [parameter.name for parameter in op.all_inputs]
    rows = [
        f"    {{{_quoted(parameter.name)}, TensorType::{TENSOR_TYPES[parameter.type]}, {_dimensions(parameter, op)}, "
        f"{_quoted(parameter.shape_text)}, {_bool(parameter.optional)}, "
        f"offsetof({struct}, {parameter.name}), "
        f"{f'static_cast<int64_t>(offsetof({struct}, {parameter.flag}))' if parameter.flag else -1}}},"
        for parameter in op.all_inputs
    ]
    aliases = {output.name: output.alias for output in op.all_outputs if output.alias}
    if op is ATTENTION:  # present_key and present_value may share the memory of the past
        aliases = {"present_key": "past_key", "present_value": "past_value"}
    return _OP.format(
        tables=tables,
        struct=struct,
        op=op.name,
        inputs=", ".join(map(_enumerator, names)),
        outputs=", ".join(_enumerator(output.name) for output in op.all_outputs),
        offsets=", ".join(f"offsetof({struct}, {symbol})" for symbol in op.symbols),
        sizes=", ".join(map(_quoted, op.symbols)),
        rows="\n".join(rows),
        output_rows="\n".join(
            f"    {{{_quoted(output.name)}, TensorType::{TENSOR_TYPES[output.type]}, {_bool(output.optional)}, "
            f"{_enumerator(aliases[output.name]) if output.name in aliases else -1}}},"
            for output in op.all_outputs
        ),
    )


def _dimensions(parameter: Parameter, op: OpDefinition) -> str:
    """Return an input's rank and dimensions as C++ initialisers.

    A dimension is {index of its symbol or -1, number to add}. An input of any shape has rank -1.
    """
    if parameter.shape is None:
        return "-1, {}"
    pairs = []
    for dimension in parameter.shape:
        symbol, _, plus = dimension.partition(" + ")
        number = op.symbols.index(symbol) if symbol in op.symbols else -1
        pairs.append(f"{{{number}, {plus or 0}}}")
    return f"{len(pairs)}, {{{', '.join(pairs)}}}"


def _enumerator(name: str) -> str:
    """Return the name of a C++ enumerator: "inner_product" becomes "kInnerProduct"."""
    return "k" + "".join(word.capitalize() for word in name.split("_"))


def _quoted(text: str) -> str:
    """Return the text as a C++ string literal; it has no quotes or backslashes."""
    return f'"{text}"'


def _bool(value: bool) -> str:
    """Return the bool as a C++ literal."""
    return "true" if value else "false"


def _number(value: float) -> str:
    """Return the number as a C++ literal of type double, NaN and infinity by their constants."""
    if math.isnan(value):
        return "std::numeric_limits<double>::quiet_NaN()"
    if math.isinf(value):
        return "kInfinite" if value > 0 else "-kInfinite"
    return f"{value:g}"


def contract_tables() -> dict[str, str]:
    """Return the Markdown tables of `docs/contract.md` by their names in the file's markers."""
    limits = {
        attribute.name: "; ".join(limit.rule for limit in attribute.limits)
        or attribute.doc * (attribute.name == "normalizer")
        for attribute in ATTRIBUTES
    }
    tables = {
        "normalizers": [
            "| normalizer | own columns of `head_params` | sink | weight 0 of a visible key |",
            "| --- | --- | --- | --- |",
            *(
                f"| {normalizer.name} | {', '.join(c.name for c in normalizer.columns) or '-'}"
                f"{'' if normalizer.needs_columns or not normalizer.columns else ' (may be left out)'} "
                f"| {'yes' if normalizer.competes else '-'} | {'yes' if normalizer.sparse else '-'} |"
                for normalizer in NORMALIZERS
            ),
        ],
        "attributes": [
            "| attribute | type | default | it must be | |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| {attribute.name} | {attribute.type} | {_default(attribute.default)} "
                f"| {limits[attribute.name].replace('|', 'or')} "
                f"| {'' if attribute.name == 'normalizer' else attribute.doc} |"
                for attribute in ATTRIBUTES
            ),
        ],
    }
    for op, (_, name) in STRUCTS.items():
        tables[f"{name.lower()} inputs"] = [
            "| # | input | type | shape | |",
            "| --- | --- | --- | --- | --- |",
            *(f"| {number} | {_row(parameter)} |" for number, parameter in enumerate(op.all_inputs)),
        ]
        tables[f"{name.lower()} outputs"] = [
            "| # | output | type | shape | |",
            "| --- | --- | --- | --- | --- |",
            *(f"| {number} | {_row(parameter)} |" for number, parameter in enumerate(op.all_outputs)),
        ]
    return {name: "\n".join(lines) for name, lines in tables.items()}


def _row(parameter: Parameter) -> str:
    """Return the row of an input or output in the Markdown table of the contract: name, type, shape, description."""
    kind = re.sub(r"tensor\((\w+)\)", r"\1", parameter.type)
    doc = (parameter.doc or (f"{parameter.alias}, updated" if parameter.alias else "")).replace("|", "&#124;")
    return f"{parameter.name} | {'optional ' * parameter.optional}{kind} | {parameter.shape_text} | {doc}"


def _default(value: object) -> str:
    """Return an attribute's default for the Markdown table; None is "required", tuples are separated by commas."""
    if value is None:
        return "required"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, int | float) else f'"{value}"'


def contract() -> str:
    """Return the text of `docs/contract.md` with up-to-date tables.

    Raises:
        SystemExit: the file lacks the marker of a table.
    """
    text = CONTRACT_FILE.read_text(encoding="utf-8")
    for name, table in contract_tables().items():
        begin, end = f"<!-- generated from plugins/op/definition.py: {name} -->", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if not found:
            raise SystemExit(f"{CONTRACT_FILE} has no line {begin}")
        text = f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    return text


def formatted(source: str) -> str:
    """Return C++ source formatted by the clang-format that is installed beside this Python.

    Raises:
        FileNotFoundError: clang-format is not installed there.
        CalledProcessError: clang-format refused the source.
    """
    import subprocess

    program = Path(sys.executable).parent / "clang-format"
    style = f"--assume-filename={HEADER_FILE}"
    return subprocess.run([program, style], input=source, capture_output=True, text=True, check=True).stdout


def generated() -> dict[Path, str]:
    """Return every generated file with its content."""
    return {HEADER_FILE: formatted(header()), CONTRACT_FILE: contract(), SCHEMA_FILE: manifest_schema()}


def main() -> None:
    """Write the generated files, or with `--check` exit with an error that names the stale ones."""
    stale = [path for path, text in generated().items() if not path.exists() or path.read_text("utf-8") != text]
    if "--check" in sys.argv[1:]:
        names = ", ".join(str(path.relative_to(CONTRACT_FILE.parents[1])) for path in stale)
        sys.exit(f"{names}: stale; run `python -m sharp.plugins.op.generate`" if stale else None)
    for path in stale:
        path.write_text(generated()[path], encoding="utf-8")


if __name__ == "__main__":
    main()

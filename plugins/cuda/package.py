"""The package of compiled kernels for `libsharp_cuda.so`: a file of images, a C++ table, an index and a manifest."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from sharp.plugins.cuda.compiler import Image

IMAGES_FILE, TABLE_FILE, MANIFEST_FILE = "kernels.bin", "kernels.cc", "kernels.json"
INDEX_FILE = "kernels.tsv"  # read by the library for kernels that are not built in (added_kernels.cc)
ALIGNMENT = 64  # bytes, for every image

_TABLE = """\
// Written by build_kernels.py: do not edit. The images lie in {images}, which the assembler includes.
#include "kernel_table.h"

__asm__(
    ".pushsection .rodata\\n"
    ".balign {alignment}\\n"
    "sharp_kernel_images:\\n"
    ".incbin {path}\\n"
    ".popsection\\n");
extern "C" __attribute__((visibility("hidden"))) const unsigned char sharp_kernel_images[];

namespace sharp::cuda {{

const KernelImage kKernelImages[] = {{
{rows}
}};
const size_t kKernelImageCount = sizeof(kKernelImages) / sizeof(kKernelImages[0]);
{constants}

}}  // namespace sharp::cuda
"""


def write_package(images: Sequence[Image], constants: Mapping[str, int], folder: Path) -> int:
    """Write the four files of the package into `folder`, which is made if needed; return the size of all images.

    The size is in bytes, with the images' alignment. `constants` are the constants of the planner of launches by their
    C++ names (`kernel_set.plan_constants`). The C++ table names the images' file by its absolute path.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = bytearray()
    rows, entries = [], []
    index: list[list[object]] = [[name, value] for name, value in constants.items()]
    for image in images:
        content += bytes(-len(content) % ALIGNMENT)
        offset = len(content)
        content += image.content
        # A space separates arguments; C++ finds each one's value by its name.
        arguments = " ".join(
            f"{name}:{kind.lstrip('*') if kind[0] != '*' else 'ptr'}" for name, kind in image.arguments
        )
        rows.append(
            f'    {{"{image.kernel}", "{image.entry}", {image.capability}, {_bool(image.ptx)}, {_bool(image.exact)}, '
            f"sharp_kernel_images + {offset}, {len(image.content)}, {image.shared_bytes}, {image.threads}, "
            f'"{arguments}", {len(image.hidden)}, {{{image.tile[0]}, {image.tile[1]}}}}},'
        )
        index.append(
            [
                *(image.kernel, image.entry, image.capability, int(image.ptx), int(image.exact), offset),
                *(len(image.content), image.shared_bytes, image.threads, len(image.hidden), *image.tile, arguments),
            ]
        )
        entries.append(
            {
                "kernel": image.kernel,
                "entry": image.entry,
                "target": image.target,
                "offset": offset,
                "bytes": len(image.content),
                "shared_bytes": image.shared_bytes,
                "threads": image.threads,
                "arguments": dict(image.arguments),
                "hidden_arguments": image.hidden,
                "tile": image.tile,
            }
        )
    (folder / IMAGES_FILE).write_bytes(content)
    table = _TABLE.format(
        images=IMAGES_FILE,
        alignment=ALIGNMENT,
        path=json.dumps(str((folder / IMAGES_FILE).resolve())).replace('"', '\\"'),
        rows="\n".join(rows),
        constants="\n".join(f"const int64_t {name} = {value};" for name, value in constants.items()),
    )
    (folder / TABLE_FILE).write_text(table, encoding="utf-8")
    lines = ("\t".join(map(str, columns)) for columns in index)
    (folder / INDEX_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / MANIFEST_FILE).write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    return len(content)


def _bool(value: bool) -> str:
    """Return the bool as a C++ literal."""
    return "true" if value else "false"

"""Archive of a run of `sharp evaluate` as a result.

sharp evaluate --compare MODEL STUDENT --control temperature=1.1 --lengths 512,1k,2k,4k,8k -o build/long-context
python -m bench.long_context build/long-context --output bench/results/long_context.json --command "sharp evaluate ..."
"""

import json
import shutil
from pathlib import Path
from typing import Any

import click

from bench.result_file import header, write

PACKAGES = ("sharp-attention", "torch", "transformers")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--output", "out", type=click.Path(path_type=Path), required=True, help="A .json file; a .png beside it.")
@click.option("--command", required=True, help="The command that wrote FOLDER.")
def main(folder: Path, out: Path, command: str) -> None:
    """Archive the figures and the picture of FOLDER, without those of single heads."""
    figures: dict[str, Any] = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    for row in figures["rows"]:
        if row["heads"] is not None:
            row["heads"] = {name: round(row["heads"][name], 4) for name in ("entropy", "support")}
    write(out, {**header("long_context", PACKAGES), "command": command, **figures})
    shutil.copyfile(folder / "evaluation.png", out.with_suffix(".png"))


if __name__ == "__main__":
    main()

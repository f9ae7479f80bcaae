"""Runs a notebook: `python -m tests.full.docs.notebook FILE` keeps in it, and beside it, what it prints and draws."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

SECONDS = 300  # that a cell may take


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """The notebook with what it prints and draws, run in `folder`."""
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def printed(notebook: nbformat.NotebookNode) -> str:
    """What its cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def main() -> None:
    """Run the file that the command line names."""
    path = Path(sys.argv[1])
    notebook = execute(nbformat.read(path, as_version=4), path.parent)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the time of day
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()

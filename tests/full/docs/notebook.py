"""Run a notebook: `python -m tests.full.docs.notebook FILE` saves its output in it and its pictures beside it."""

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

SECONDS = 900  # time limit of a cell


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook in `folder`, and return it with its output."""
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def printed(notebook: nbformat.NotebookNode) -> str:
    """Return the text that the cells of a notebook print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output["text"] for output in outputs if output["output_type"] == "stream")


def main() -> None:
    """Run the notebook that the command line names."""
    path = Path(sys.argv[1])
    notebook = execute(nbformat.read(path, as_version=4), path.parent)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the time of day would change the file
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main()

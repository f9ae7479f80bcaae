"""The command `sharp docs`, which shows the documents of Sharp from the installation, without the repository."""

import sys
from difflib import get_close_matches
from pathlib import Path

import click

from sharp.core.cli import SharpCommand, colour
from sharp.core.errors import NotFoundError

FOLDER = Path(__file__).parents[1] / "docs"  # beside core in the repository, and in an installation
# For developers: records of decisions, and examples of clients, which are more than a page.
LEFT_OUT = ("decisions", "clients")


@click.command(cls=SharpCommand, epilog="See also: sharp docs faq, sharp docs troubleshooting, sharp help COMMAND.")
@click.argument("page", required=False)
def docs(page: str | None) -> None:
    """Show the document PAGE, such as adapt or how-to/gpu; without PAGE, list all documents."""
    found = pages()
    if page is None:
        width = max(map(len, found))
        for name, path in found.items():
            click.echo(f"{name:{width}}  {title(path)}")
        return
    text = found[page_name(page, list(found))].read_text(encoding="utf-8")
    if sys.stdout.isatty():
        click.echo_via_pager(rendered(text) if colour() is None else text)
    else:
        click.echo(text, nl=False)


def pages() -> dict[str, Path]:
    """Return the paths of all documents by their names, which are relative paths without the suffix.

    Raises:
        NotFoundError: the documents are not installed.
    """
    paths = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in sorted(FOLDER.rglob("*.md"))}
    found = {name: path for name, path in paths.items() if name.split("/", 1)[0] not in LEFT_OUT}
    if not found:
        raise NotFoundError("the documents are not installed; install Sharp from its wheel or its repository")
    return found


def page_name(asked: str, names: list[str]) -> str:
    """Return the one of `names` that a user means by a name, its last part, or a path such as docs/adapt.md.

    Raises:
        NotFoundError: there is no such page; the message suggests a close name, if there is one.
    """
    requested = asked.partition("#")[0].removeprefix("docs/").removesuffix(".md")
    ends = [name for name in names if name.rpartition("/")[2] == requested]
    if requested in names:
        return requested
    if len(ends) == 1:
        return ends[0]
    by_end = {name.rpartition("/")[2]: name for name in names} | {name: name for name in names}
    close = get_close_matches(requested, by_end, 1)
    hint = f"did you mean {by_end[close[0]]!r}?" if close else "sharp docs lists all pages"
    raise NotFoundError(f"there is no page {asked!r}; {hint}")


def title(path: Path) -> str:
    """Return the first heading of a page; empty if it has none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")


def rendered(text: str) -> str:
    """Return Markdown as text with colours for the width of the terminal."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(force_terminal=True)
    with console.capture() as capture:
        console.print(Markdown(text, hyperlinks=False))
    return capture.get()

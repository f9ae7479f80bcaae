"""Help by groups of options; where a command has many, `-h` shows the common ones, and `--help=GROUP` the rest."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import click

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
COMMON, ALL, OTHERS = "common", "all", "Options"
SHOWN = "sharp.help"  # in the context: the group whose help is shown, or one of the two above
SENTENCE = re.compile(r"(?<=[.:;])\s")
DEFAULT, SHORT_DEFAULT = "  [default: ", 16  # characters; a longer one is not for a line


class GroupedCommand(click.Command):
    """A command whose options are shown in groups.

    Attributes:
        groups: the flags of each group, in order; an option of none is under "Options".
        common: the flags that `-h` shows, each in a line; empty where it shows all.
    """

    def __init__(
        self,
        *arguments: Any,
        groups: Mapping[str, Collection[str]] | None = None,
        common: Collection[str] = (),
        **attributes: Any,
    ) -> None:
        attributes["context_settings"] = HELP | (attributes.get("context_settings") or {})
        super().__init__(*arguments, **attributes)
        self.groups = {} if groups is None else groups
        self.common = frozenset(common)
        names = [name.lower() for name in (COMMON, ALL, *self.groups, OTHERS)]
        self._help_by_group = click.Option(
            HELP["help_option_names"],
            is_flag=False,
            flag_value=COMMON,
            is_eager=True,
            expose_value=False,
            type=click.Choice(names, case_sensitive=False),
            metavar="[GROUP]",
            callback=_show,
            help="Show the options of a group, or all of them, and exit.",
        )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """A group is given as --help=GROUP only: the word behind a bare -h or --help is another argument."""
        if self.common:
            args = [f"--help={COMMON}" if word in HELP["help_option_names"] else word for word in args]
        return super().parse_args(ctx, args)

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        """`--help`, with a group where there are many options."""
        return self._help_by_group if self.common else super().get_help_option(ctx)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What the command does: the first paragraph, or all."""
        if not self._brief(ctx) or self.help is None:
            super().format_help_text(ctx, formatter)
            return
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(self.help.partition("\n\n")[0])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A section for every group."""
        shown = ctx.meta.get(SHOWN, COMMON)
        for title, options in self._by_group(ctx):
            if shown not in (COMMON, ALL, title.lower()):
                continue
            chosen = [one for one in options if not self._brief(ctx) or not self.common.isdisjoint(one.opts)]
            rows = [record for one in chosen if (record := one.get_help_record(ctx)) is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(map(_in_a_line, rows) if self._brief(ctx) else rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """How to see the other options, and what else to read."""
        if self._brief(ctx):
            names = ", ".join(title.lower() for title, _ in self._by_group(ctx))
            count = sum(len(options) for _, options in self._by_group(ctx))
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(
                    f"{len(self.common)} of {count} options. --help=all shows all, --help=GROUP those of: {names}."
                )
        super().format_epilog(ctx, formatter)

    def _brief(self, ctx: click.Context) -> bool:
        return bool(self.common) and ctx.meta.get(SHOWN, COMMON) == COMMON

    def _by_group(self, ctx: click.Context) -> Iterator[tuple[str, list[click.Option]]]:
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        for title, flags in self.groups.items():
            yield title, [one for one in options if not set(flags).isdisjoint(one.opts)]
        grouped = {flag for flags in self.groups.values() for flag in flags}
        yield OTHERS, [one for one in options if grouped.isdisjoint(one.opts)]


def _show(ctx: click.Context, _option: click.Parameter, group: str | None) -> None:
    """Print the help and leave, as click's own option does."""
    if group is None or ctx.resilient_parsing:
        return
    ctx.meta[SHOWN] = group
    click.echo(ctx.get_help(), color=ctx.color)
    ctx.exit()


def _in_a_line(record: tuple[str, str]) -> tuple[str, str]:
    """The first sentence of what an option does."""
    names, text = record
    said, _, default = text.partition(DEFAULT)
    sentence = SENTENCE.split(said, 1)[0].rstrip(".:;")
    return names, sentence + (f"{DEFAULT}{default}" if 0 < len(default) <= SHORT_DEFAULT else "")

"""Help by groups of options. If a command has many, `-h` shows the common options and `--help=GROUP` a group."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import click

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
VERSION = click.Option(
    ["--version"],
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, _option, requested: print_version(ctx, requested),
    help="Show the version and exit.",
)
COMMON, ALL, OTHERS = "common", "all", "Options"
SHOWN = "sharp.help"  # key in click's context: the group whose help is shown, COMMON or ALL
SENTENCE = re.compile(r"(?<=[.:;])\s")
DEFAULT, SHORT_DEFAULT = "  [default: ", 16  # characters; a longer default is left out of brief help


class GroupedCommand(click.Command):
    """A command whose options are shown in groups.

    Attributes:
        groups: the flags of each group, in order; options in no group are under "Options".
        common: the flags that `-h` shows, each in a line; if empty, `-h` shows all.
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
        text = (
            "Show the options of a group, or all of them, and exit." if self.common else "Show this message and exit."
        )
        self._help_by_group = help_option(names, text, "[GROUP]" if self.common else "")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse arguments; a help group is given as --help=GROUP only, so a word after -h or --help is no group."""
        return super().parse_args(
            ctx, [f"--help={COMMON}" if word in HELP["help_option_names"] else word for word in args]
        )

    def get_help_option(self, _ctx: click.Context) -> click.Option | None:
        """Return the option `--help`, which takes a group."""
        return self._help_by_group

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the parameters of the command with `--version` and `--help`."""
        return with_version(super().get_params(ctx))

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description of the command: all of it, or its first paragraph in brief help."""
        if not self._brief(ctx) or self.help is None:
            super().format_help_text(ctx, formatter)
            return
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(self.help.partition("\n\n")[0])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for every group that is shown."""
        shown = ctx.meta.get(SHOWN, COMMON)
        for title, options in self._by_group(ctx):
            if shown not in (COMMON, ALL, title.lower()):
                continue
            chosen = [option for option in options if not self._brief(ctx) or not self.common.isdisjoint(option.opts)]
            rows = [record for option in chosen if (record := option.get_help_record(ctx)) is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(map(_in_a_line, rows) if self._brief(ctx) else rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write, in brief help, how to see the other options; then the command's own epilog."""
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
        """Whether the help in progress shows the common options only, as --help does without a group."""
        return bool(self.common) and ctx.meta.get(SHOWN, COMMON) == COMMON

    def _by_group(self, ctx: click.Context) -> Iterator[tuple[str, list[click.Option]]]:
        """Yield each group's title with its options, and at the end `OTHERS` with the options that are in no group."""
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        for title, flags in self.groups.items():
            yield title, [option for option in options if not set(flags).isdisjoint(option.opts)]
        grouped = {flag for flags in self.groups.values() for flag in flags}
        yield OTHERS, [option for option in options if grouped.isdisjoint(option.opts)]


def help_option(names: Sequence[str], text: str, metavar: str) -> click.Option:
    """Return the option `--help=NAME` for one of `names`; its callback prints the help and exits."""
    return click.Option(
        HELP["help_option_names"],
        is_flag=False,
        flag_value=COMMON,
        is_eager=True,
        expose_value=False,
        type=click.Choice(names, case_sensitive=False),
        metavar=metavar,
        callback=_show,
        help=text,
    )


def with_version(parameters: list[click.Parameter]) -> list[click.Parameter]:
    """Return the parameters of a command with the option `--version` before the last one, `--help`."""
    return [*parameters[:-1], VERSION, *parameters[-1:]]


def print_version(ctx: click.Context, requested: bool) -> None:
    """Print the version and exit, as the callback of `--version`."""
    if requested and not ctx.resilient_parsing:
        click.echo(f"sharp, version {version('sharp-attention')}", color=ctx.color)
        ctx.exit()


def _show(ctx: click.Context, _option: click.Parameter, group: str | None) -> None:
    """Print the help of `group` and exit, as click's own option does; do nothing without the option.

    `group` is `COMMON`, `ALL` or the name of a group in lower case; None means that the option was not given. Under
    resilient parsing (shell completion) nothing is printed either. The group is stored in `ctx.meta[SHOWN]`, from which
    the methods of `GroupedCommand` read it.
    """
    if group is None or ctx.resilient_parsing:
        return
    ctx.meta[SHOWN] = group
    click.echo(ctx.get_help(), color=ctx.color)
    if group == ALL and isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            try:
                command = ctx.command.get_command(ctx, name)
            except click.ClickException as error:  # the command needs a package that is not installed
                click.echo(f"\n{ctx.command_path} {name}: {error.message}", color=ctx.color)
                continue
            assert command is not None
            with click.Context(command, info_name=name, parent=ctx) as own:
                click.echo(f"\n{own.get_help()}", color=ctx.color)
    ctx.exit()


def _in_a_line(record: tuple[str, str]) -> tuple[str, str]:
    """Return (flags, help) of an option with the help cut to its first sentence, for `-h`.

    A default of at most `SHORT_DEFAULT` characters stays behind the sentence; a longer default is left out.
    """
    names, text = record
    said, _, default = text.partition(DEFAULT)
    sentence = SENTENCE.split(said, 1)[0].rstrip(".:;")
    return names, sentence + (f"{DEFAULT}{default}" if 0 < len(default) <= SHORT_DEFAULT else "")

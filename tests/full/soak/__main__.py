"""`python -m tests.full.soak --minutes 60`: mixed load on a server; exit code 1 if something grew or was wrong."""

import sys
import tempfile
from pathlib import Path

import click

from bench.result_file import header, write
from tests.full.soak.soak import soak


@click.command()
@click.option("--minutes", default=60.0, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--cancelled-streams/--no-cancelled-streams",
    default=True,
    show_default=True,
    help="With clients that cancel gRPC streams, after each of which grpcio keeps some bytes.",
)
@click.option("--hostile", is_flag=True, help="With the attacks of attacks.py.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(minutes: float, seed: int, cancelled_streams: bool, hostile: bool, output: Path | None) -> None:
    """Load a server for `minutes`."""
    with tempfile.TemporaryDirectory() as folder:
        report = soak(
            Path(folder),
            60 * minutes,
            max(60 * minutes / 400, 0.5),
            seed,
            cancelled_streams=cancelled_streams,
            hostile=hostile,
        )
    first, last = report.thirds()
    without = "" if cancelled_streams else " --no-cancelled-streams"
    command = f"python -m tests.full.soak --minutes {minutes:g} --seed {seed}{without}{' --hostile' * hostile}"
    write(output, {**header("soak"), "command": command, **report.figures()})
    shown = ", ".join(f"{name} {first[name]:,.0f} to {last[name]:,.0f}" for name in first)
    print(f"{sum(report.requests.values())} requests; from the first third to the last: {shown}")
    print(f"grown: {report.grown()}; latency x {report.latency_drift():.2f}; wrong: {len(report.wrong)}")
    for line in report.wrong[:20]:
        print(line)
    sys.exit(int(bool(report.grown() or report.wrong)))


if __name__ == "__main__":
    main()

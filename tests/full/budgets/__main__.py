"""`python -m tests.full.budgets [--output FILE]`: measure what each kind of request costs a server and its clients."""

import tempfile
from dataclasses import asdict
from pathlib import Path

import click

from bench.result_file import header, write
from tests.full.budgets.measure import budget_server, costs


@click.command()
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
@click.option("--name", "names", multiple=True, help="Only this kind of request.")
def main(output: Path | None, names: tuple[str, ...]) -> None:
    """Send every kind of request to a server while another client reads a stream."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, budget_server(Path(folder)) as running:
        for name, cost in costs(running, names):
            rows.append({"name": name, **asdict(cost)})
            print(
                f"{name:32} {cost.status:>20} {cost.sent / 1e6:6.3f} MB sent, {cost.cpu_seconds:6.2f} s CPU, "
                f"{cost.memory / 1e6:6.1f} MB, gap {1e3 * cost.gap:6.1f} ms ({1e3 * cost.gap_before:.1f} without)",
                flush=True,
            )
    write(output, {**header("budgets"), "command": "python -m tests.full.budgets", "rows": rows})


if __name__ == "__main__":
    main()

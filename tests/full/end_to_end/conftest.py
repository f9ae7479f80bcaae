"""Real checkpoints, exported by the command that a user types, in this process, which has already imported torch."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from sharp.exporter.cli import export as command
from tests.exporting import one_registry, one_trace, quick_tracing

__all__ = ["one_registry", "one_trace", "quick_tracing"]


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory):
    """Return a function that exports a checkpoint, once per source, norm and form."""
    folders: dict[tuple[Path, str, str], Path] = {}

    def make(source: Path, norm: str, cache: str = "paged") -> Path:
        if (source, norm, cache) not in folders:
            folder = tmp_path_factory.mktemp("models") / f"{source.stem}-{norm}"
            arguments = [source, "--norm", norm, "--cache", cache, "--untrained-norm", "-o", folder]
            result = CliRunner().invoke(command, [str(argument) for argument in arguments])
            assert result.exit_code == 0, result.output
            folders[source, norm, cache] = folder
        return folders[source, norm, cache]

    return make

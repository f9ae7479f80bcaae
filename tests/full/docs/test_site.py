"""The documentation's site builds strictly, without a network, and has all pages and options."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-c",
        "docs/site",
        "-b",
        "dirhtml",
        ".",
        folder,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


def test_every_command_setting_and_public_name_is_on_a_page(site: Path) -> None:
    commands, settings, python = (
        (site / "docs" / "reference" / page / "index.html").read_text() for page in ("cli", "settings", "python")
    )
    options = ("adapt-budget", "export-norm-map", "serve-grpc-port", "bench-latency-passes", "doctor-json")
    assert [option for option in options if f'id="cmdoption-sharp-{option}"' not in commands] == []
    assert "SHARP_GRPC_PORT" in settings
    assert all(f'id="sharp.{name}"' in python for name in ("LLM", "SamplingParams", "Client", "export", "adapt"))


def test_a_reader_without_a_network_sees_all_of_it(site: Path) -> None:
    loaded = re.compile(r"<(?:script|img|link)[^>]*(?:src|href)=\"(https?:[^\"]+)\"")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    assert {address for page in pages for address in loaded.findall(page.read_text())} == set()
    formulas = (site / "docs" / "norms" / "entmax" / "index.html").read_text()
    assert "mathjax" in formulas and (site / "_static" / "mathjax" / "tex-chtml.js").is_file()


def test_search_finds_a_page_by_its_words(site: Path) -> None:
    index = (site / "searchindex.js").read_text()
    assert "docs/norms/adaptive-temperature" in index and "sparsemax" in index


def test_the_pictures_of_norms_are_those_of_the_reference(tmp_path: Path) -> None:
    script = (ROOT / "docs" / "norms" / "plots.py").read_text()
    (tmp_path / "plots.py").write_text(script)
    subprocess.run([sys.executable, tmp_path / "plots.py"], check=True, cwd=ROOT)
    for picture in sorted(tmp_path.glob("*.svg")):
        new_paths = re.findall(r'<path d="([^"]*)"', picture.read_text())
        kept_paths = re.findall(r'<path d="([^"]*)"', (ROOT / "docs" / "norms" / picture.name).read_text())
        assert new_paths == kept_paths, f"run python docs/norms/plots.py for {picture.name}"


def test_picture_and_table_of_the_key_screen_are_those_of_the_results(tmp_path: Path) -> None:
    code = "import pathlib, sys; import key_screen; key_screen.main(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, tmp_path]
    table = subprocess.run(command, check=True, cwd=ROOT / "docs", capture_output=True, text=True).stdout
    paths, kept_paths = (
        re.findall(r'<path d="([^"]*)"', (folder / "key-screen.svg").read_text())
        for folder in (tmp_path, ROOT / "docs")
    )
    assert paths == kept_paths, "run python docs/key_screen.py"
    assert table.strip() in (ROOT / "docs" / "key-screen.md").read_text(), "copy what python docs/key_screen.py prints"

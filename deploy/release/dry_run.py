"""`make release-dry-run`: writes the files of a release to dist/, beside the wheel of `make wheel`; docs/release.md."""

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
SCRIPTS = Path(sys.executable).parent
LIST = "sharp.cdx.json"
EXTRAS = "serve,tracing"  # what a server installs, as in deploy/docker


def main() -> None:
    """Check version and wheel; write release notes, the list of packages and checksums into dist/.

    The program ends with a message if a tag, a wheel or the changelog does not fit the version.

    Raises:
        subprocess.CalledProcessError: git, twine, pip or cyclonedx-py fails.
    """
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    tags = output("git", "tag", "--points-at", "HEAD").split()
    tagged = check_tags(tags, version)
    wheels = sorted(DIST.glob("*.whl"))
    own = [wheel for wheel in wheels if wheel.name.endswith("_x86_64.whl")]
    if len(own) != 1 or not all(wheel.name.startswith(f"sharp_attention-{version}-") for wheel in wheels):
        sys.exit(
            f"dist holds {[wheel.name for wheel in wheels]}; run make wheel, which leaves one of version {version}"
        )
    subprocess.run([SCRIPTS / "twine", "check", "--strict", *wheels], check=True)
    notes = release_notes((ROOT / "CHANGELOG.md").read_text(), version, tagged=tagged)
    (DIST / "RELEASE_NOTES.md").write_text(notes)
    list_packages(own[0], DIST / LIST)
    files = sorted(path for path in DIST.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (DIST / "SHA256SUMS").write_text(sums)
    print(sums, end="")
    state = "is tagged: its files can be uploaded" if tagged else "has no tag yet: nothing of this may be uploaded"
    print(f"sharp-attention {version} {state} (docs/release.md).")


def check_tags(tags: list[str], version: str) -> bool:
    """Return whether HEAD has the tag of a release; a tag of another version than `version` ends the program."""
    releases = [tag for tag in tags if re.fullmatch(r"v\d.*", tag)]
    wrong = [tag for tag in releases if tag != f"v{version}"]
    if wrong:
        sys.exit(f"the tag {wrong[0]} is not the version {version} of pyproject.toml; correct one of them")
    return bool(releases)


def release_notes(changelog: str, version: str, *, tagged: bool) -> str:
    """Return the part of the changelog about `version`.

    Unless `tagged`, the part of unreleased changes comes in its place if there is one. If the part is missing or empty,
    the program ends with a message.
    """
    parts = re.split(r"^## \[?([^\]\s]+).*\n", changelog, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    text = sections.get(version, "") if tagged else sections.get("Unreleased") or sections.get(version, "")
    if not text.strip():
        sys.exit(f'CHANGELOG.md has nothing under "## {version}"; move there what is under "## Unreleased"')
    return text.strip() + "\n"


def list_packages(wheel: Path, path: Path) -> None:
    """Write CycloneDX's list of what installing the wheel for a server brings, in the versions of constraints.txt.

    Raises:
        subprocess.CalledProcessError: pip or cyclonedx-py fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=False)
        python = Path(folder) / "bin" / "python"
        constraints = ROOT / "constraints.txt"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--quiet"]
        subprocess.run([*pip, "--only-binary", ":all:", "--constraint", constraints, f"{wheel}[{EXTRAS}]"], check=True)
        cyclonedx = [SCRIPTS / "cyclonedx-py", "environment", "--output-reproducible"]
        subprocess.run([*cyclonedx, "--output-file", path, python], check=True)


def output(*command: str) -> str:
    """Return what a command prints to stdout when it runs in the root of the repository.

    Raises:
        subprocess.CalledProcessError: the command fails.
    """
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()

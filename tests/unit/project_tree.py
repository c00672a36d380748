"""The project's own files, for tests that read them; knows git and where the root is, nothing else."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def project_files() -> list[str]:
    """Return every file that is in git, or would be by `git add .`, as paths from the root, sorted."""
    # safe.directory: in a container the clone often belongs to another user, and git would refuse to read it.
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    return sorted(name for name in set(listed.stdout.split("\0")) if name and (ROOT / name).is_file())


def text_files() -> list[tuple[str, str]]:
    """Return `(path, text)` of every text file, except the licence and what tools wrote into weights/."""
    found = []
    for name in project_files():
        if name == "LICENSE" or (name.startswith(("weights/", "weights-text/")) and not name.endswith(".md")):
            continue
        try:
            found.append((name, (ROOT / name).read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def commands() -> list[Path]:
    """Return the commands in scripts/: files without a suffix."""
    return sorted(path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix)

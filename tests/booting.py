"""Boots in fresh processes, over real Inductor; every boot has its own place, and stores are shared as a test says."""

import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from warmstart import bundle
from warmstart.bundle import Limits

ROOT = Path(__file__).resolve().parent.parent
DRIVER = ROOT / "tests" / "boot" / "driver.py"
# Pictures asked of every boot that is compared with another: each shape, one and four outputs, guidance on and off.
DRAWN = [
    ["a handwritten seven", "1:1", 1, 8, 1.0, 11],
    ["three", "3:2", 1, 8, 1.0, 12],
    ["3", "2:3", 4, 8, 1.0, 13],
    ["nine", "1:1", 4, 8, 2.5, 14],
    ["zero", "3:2", 2, 4, 2.5, 15],
]
# One request and the one region that is quick to compile: enough to climb every rung.
ONE = "import predict\nPLAN = [predict.request('7', '1:1', 1, 1, 1.0, 0)]"
TWO = ONE + "\nPLAN.append(predict.request('7', '3:2', 1, 1, 1.0, 0))"
SMALL = {"WARMSTART_REGIONS": "FeedForward"}
# Its one kernel is built in less time without the header that many kernels share.
HEADER = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
QUICK = {**SMALL, HEADER: "0"}
# Slower to compile, and all that it is given depends on the picture's size: another size uses nothing of it.
BLOCK = {"WARMSTART_REGIONS": "FluxTransformerBlock"}
SEVEN = [["a handwritten seven", "1:1", 1, 8, 1.0, 11]]


def warnings(report: dict) -> list[str]:
    """Those of a boot, but for how fast it was: another process may have had the core in that moment."""
    return [warning for warning in report["warnings"] if "times as long compiled" not in warning]


@dataclass
class Booted:
    """What a boot's process told."""

    report: dict
    drawn: list[dict]
    threads: list[dict]
    log: str
    after: object = None

    @property
    def counts(self) -> dict:
        return self.report["counts"]

    @property
    def pictures(self) -> list[list[str]]:
        return [item["pictures"] for item in self.drawn]


@dataclass
class Boot:
    """Starts boots; `temporary` holds each one's live directory, so that no two share one."""

    temporary: Path
    python: str = sys.executable

    @functools.cached_property
    def project(self) -> Path:
        """This clone, but for the bundles in `cache/` that its own boots may have left: tests would start from them."""
        place = Path(tempfile.mkdtemp(prefix="project-", dir=self.temporary))
        place.chmod(0o755)
        for path in ROOT.iterdir():
            if path.name != "cache" and not path.name.startswith("."):
                (place / path.name).symlink_to(path)
        return place

    def __call__(self, store: Path | str, **options) -> Booted:
        """Boots with WARMSTART_CACHE_URL = store.

        Args:
            store: where bundles are.
            options: those of `start`.
        """
        done = self.start(store, **options)
        assert done.returncode == 0, f"the boot failed:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        # Not always the last line: what is not saved yet is tried once more, and told, at the process's end.
        [line] = [line for line in done.stdout.splitlines() if line.startswith('{"report": ')]
        answer = json.loads(line)
        return Booted(
            answer["report"], answer["drawn"], answer["threads"], done.stdout + done.stderr, answer.get("after")
        )

    def start(
        self,
        store: Path | str,
        *,
        project: Path | None = None,
        as_user: int | None = None,
        environment=None,
        wrap=(),
        **order,
    ) -> subprocess.CompletedProcess:
        """As a call, but also for a boot that fails.

        Args:
            store: where bundles are.
            project: the clone to run, in place of this one.
            as_user: numeric user to run as, in place of this one.
            environment: variables on top; None as a value removes one.
            wrap: a command that the boot's own is appended to, which prepares its surroundings.
            order: what the driver understands (predictor, draw, threads, before, after, folder).
        """
        temporary = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.temporary))
        temporary.chmod(0o777)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("WARMSTART_", "TORCH"))}
        clean |= {"WARMSTART_CACHE_URL": str(store), "TMPDIR": str(temporary), "HOME": str(temporary)}
        clean |= {"PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
        clean = {name: value for name, value in clean.items() if value is not None}
        command = [*wrap, self.python, str(DRIVER), json.dumps(order)]
        if as_user is not None:
            # A user namespace: the process sees itself as that user, who has no passwd entry, and may still read the
            # interpreter's own files, wherever those are installed.
            command = ["unshare", "--user", f"--map-user={as_user}", f"--map-group={as_user}", *command]
        return subprocess.run(
            command, cwd=project or self.project, env=clean, capture_output=True, text=True, timeout=900
        )


def rebuild(packed: Path, folder: Path, work: Path) -> None:
    root = work / f"root-{packed.name[:12]}"
    root.mkdir()
    bundle.unpack(packed, packed.name.removesuffix(".tar.zst"), root, Limits())
    for library in root.rglob("*.so"):
        # Whole by its size and its section table, but without segments, so that only the loader finds out.
        data = library.read_bytes()
        library.write_bytes(data[:64] + bytes(640) + data[704:])
    entries = [item for path in bundle.scan(root) if (item := incomplete(root, path))]
    made = bundle.pack(root, entries, work, Limits())
    shutil.copytree(packed.parent, folder, ignore=shutil.ignore_patterns("*.zst"), dirs_exist_ok=True)
    shutil.copyfile(made.path, folder / f"{made.name}.tar.zst")


def incomplete(root: Path, path: str) -> bundle.Entry:
    data = (root / path).read_bytes()
    return bundle.Entry(path, len(data), hashlib.sha256(data).hexdigest(), False)

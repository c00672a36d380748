"""Boots in fresh processes, over real Inductor; every boot has its own place, and stores are shared as a test says."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DRIVER = Path(__file__).with_name("driver.py")
# Pictures asked of every boot that is compared with another: each shape, one and four outputs, guidance on and off.
DRAWN = [
    ["a handwritten seven", "1:1", 1, 8, 1.0, 11],
    ["three", "3:2", 1, 8, 1.0, 12],
    ["3", "2:3", 4, 8, 1.0, 13],
    ["nine", "1:1", 4, 8, 2.5, 14],
    ["zero", "3:2", 2, 4, 2.5, 15],
]


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
    count: int = field(default=0)

    def __call__(self, store: Path | str, *, project: Path = ROOT, as_user: int | None = None, **options) -> Booted:
        """Boots with WARMSTART_CACHE_URL = store.

        Args:
            store: where bundles are.
            project: the clone to run.
            as_user: numeric user to run as, in place of this one.
            options: `environment`, and what the driver understands (draw, threads, before, after, folder).
        """
        done = self.start(store, project=project, as_user=as_user, **options)
        assert done.returncode == 0, f"the boot failed:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        answer = json.loads(done.stdout.splitlines()[-1])
        return Booted(
            answer["report"], answer["drawn"], answer["threads"], done.stdout + done.stderr, answer.get("after")
        )

    def start(
        self, store: Path | str, *, project: Path = ROOT, as_user: int | None = None, environment=None, **order
    ) -> subprocess.CompletedProcess:
        """As a call, but also for a boot that fails."""
        self.count += 1
        place = self.temporary / f"tmp-{self.count}"
        place.mkdir(mode=0o777)
        place.chmod(0o777)
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("WARMSTART_", "TORCH"))}
        clean |= {"WARMSTART_CACHE_URL": str(store), "TMPDIR": str(place), "HOME": str(place)}
        clean |= {"PYTHONDONTWRITEBYTECODE": "1", **(environment or {})}
        command = [self.python, str(DRIVER), json.dumps(order)]
        if as_user is not None:
            # A user namespace: the process sees itself as that user, who has no passwd entry, and may still read the
            # interpreter's own files, wherever those are installed.
            command = ["unshare", "--user", f"--map-user={as_user}", f"--map-group={as_user}", *command]
        return subprocess.run(command, cwd=project, env=clean, capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="session")
def boot(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Booted]:
    return Boot(tmp_path_factory.mktemp("boots"))


@pytest.fixture(scope="session")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that the first boot of the default model fills and later ones are warmed by."""
    return tmp_path_factory.mktemp("shared") / "store"


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where boots leave what they drew, as PNG by digest."""
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="session")
def cold(boot, shared_store: Path, pictures: Path) -> Booted:
    """The first boot ever of the default model."""
    return boot(shared_store, draw=DRAWN, folder=str(pictures), threads=5)

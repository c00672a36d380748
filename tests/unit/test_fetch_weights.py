"""scripts/fetch_weights against a hub on loopback: what it fetches, how it goes on, and that nothing is half there.

The hub's log tells what was asked for.
"""

import gzip
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import _fetch
import pytest
import zstandard
from hub import Hub, nobody
from project_tree import ROOT

COMMAND = ROOT / "scripts" / "fetch_weights"
BIG = "transformer/diffusion_pytorch_model.safetensors"
CHUNK_BYTES = 10 * 1024 * 1024  # the client writes no less at a time
LARGE_BYTES = 2 * CHUNK_BYTES + 4_000_000
BIG_BYTES = 200_000


def write(root: Path, files: dict[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("hub"), BIG_BYTES)


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Hub]:
    """A hub whose model comes in several chunks."""
    with Hub({"some/model": repository(tmp_path / "large", LARGE_BYTES)}) as started:
        yield started


def repository(folder: Path, size_bytes: int) -> Path:
    """A repository as they are: the pipeline, and much that it does not load."""
    index = {"_class_name": "P", "transformer": ["d", "T"], "tokenizer": ["t", "C"], "safety_checker": [None, None]}
    pattern = hashlib.sha256(b"weights").digest()
    return write(
        folder,
        {
            "model_index.json": json.dumps(index),
            "README.md": "a card",
            "LICENSE.md": "a licence",
            "flux1.safetensors": b"the same again",
            "transformer/config.json": "{}",
            BIG: (pattern * (size_bytes // 32 + 1))[:size_bytes],
            "transformer/diffusion_pytorch_model.fp16.safetensors": b"half",
            "transformer/diffusion_pytorch_model.bin": b"a pickle",
            "transformer/flax_model.msgpack": b"flax",
            "tokenizer/vocab.json": "{}",
            "tokenizer/merges.txt": "a b",
            "unused/model.safetensors": b"of nothing in the index",
        },
    )


WANTED = {
    "model_index.json", "LICENSE.md", "transformer/config.json", BIG, "tokenizer/vocab.json", "tokenizer/merges.txt",
}  # fmt: skip


@pytest.fixture
def hub(pipeline: Path) -> Iterator[Hub]:
    with Hub({"some/model": pipeline}) as started:
        yield started


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def command(url: str, *arguments: str | Path, **environment: str) -> tuple[list[str], dict[str, str]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "WARMSTART_"))}
    clean |= {"HF_ENDPOINT": url, "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    return [sys.executable, str(COMMAND), *map(str, arguments)], clean


def fetch_apart(
    hub: Hub | str, target: Path, *arguments: str, model: str = "some/model", **environment: str
) -> subprocess.CompletedProcess:
    """As a user runs it."""
    url = hub if isinstance(hub, str) else hub.url
    line, clean = command(url, model, "--into", target, *arguments, **environment)
    return subprocess.run(line, env=clean, capture_output=True, text=True, timeout=120)


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The same within this process, which takes a tenth of the time."""
    loader = SourceFileLoader("scripts_fetch_weights", str(COMMAND))
    spec = spec_from_loader(loader.name, loader)
    assert spec
    module = module_from_spec(spec)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    loader.exec_module(module)
    monkeypatch.setattr(module._signals, "end_in_order", lambda: None)

    def run(
        hub: Hub,
        target: Path,
        *arguments: str,
        model: str = "some/model",
        HF_TOKEN: str = "",  # noqa: N803
    ) -> subprocess.CompletedProcess:
        monkeypatch.setattr(_fetch, "ENDPOINT", hub.url)
        monkeypatch.setenv("HF_TOKEN", HF_TOKEN)
        status = module.main([model, "--into", str(target), *arguments])
        return subprocess.CompletedProcess([], status, *capsys.readouterr())

    return run


def refused(fetch: Callable[..., Any], hub: Hub | str, target: Path, *arguments: str, **options: str) -> str:
    """The one sentence of a fetch that fails; nothing of it may lie where the model would be loaded from."""
    before = contents(target)
    done = fetch(hub, target, *arguments, **options)
    assert done.returncode == 1, done.stderr
    assert contents(target) == before
    assert "Traceback" not in done.stderr
    [said] = [line for line in done.stderr.splitlines() if "was not fetched: " in line]
    return said


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names(folder: Path) -> set[str]:
    return set(contents(folder)) - {_fetch.NOTE}


# --- What is fetched -------------------------------------------------------------------------------------------------


def test_what_a_boot_loads_is_fetched_and_nothing_else(hub: Hub, pipeline: Path, target: Path) -> None:
    done = fetch_apart(hub, target)
    assert done.returncode == 0, done.stderr
    assert names(target) == WANTED
    assert all(contents(target)[name] == (pipeline / name).read_bytes() for name in WANTED)
    assert set(hub.fetched()) == WANTED
    assert f"is the commit {hub.commit('some/model')}" in done.stderr
    note = json.loads((target / _fetch.NOTE).read_text())
    assert (note["source"], note["revision"]) == ("some/model", "main")
    assert note["commit"] == hub.commit("some/model")
    assert set(note["files"]) == WANTED
    assert [path.name for path in target.parent.iterdir()] == ["weights"]
    assert "%" not in done.stderr, "no bar where nobody looks"


def test_the_default_model_fetched_has_the_same_key(fetch, target: Path) -> None:
    from warmstart.key import model_version

    with Hub({"digits/flux": ROOT / "weights"}) as hub:
        assert fetch(hub, target, model="digits/flux").returncode == 0
    assert model_version(target) == model_version(ROOT / "weights")


def test_a_variant_gets_the_name_that_is_loaded(fetch, hub: Hub, target: Path) -> None:
    assert fetch(hub, target, "--variant", "fp16").returncode == 0
    assert names(target) == WANTED
    assert (target / BIG).read_bytes() == b"half"


def test_more_and_less_can_be_asked_for(fetch, hub: Hub, target: Path) -> None:
    done = fetch(hub, target, "--include", "*.md", "--exclude", "tokenizer/*", "--exclude", BIG)
    assert done.returncode == 0
    assert names(target) == {"model_index.json", "LICENSE.md", "README.md", "transformer/config.json"}


def test_a_token_goes_to_the_hub_and_not_to_the_host_of_the_large_files(fetch, hub: Hub, target: Path) -> None:
    hub.gated["some/model"] = "hf_secret"
    said = refused(fetch, hub, target)
    assert "is gated" in said
    assert "HF_TOKEN" in said
    hub.elsewhere = True
    hub.asked.clear()
    del hub.gated["some/model"]  # the other host asks for no token
    assert fetch(hub, target, HF_TOKEN="hf_secret").returncode == 0
    large = [asked for asked in hub.asked if asked.path.endswith(BIG)]
    assert [(asked.status, asked.authorization) for asked in large] == [(302, "Bearer hf_secret"), (200, "")]


# --- Going on --------------------------------------------------------------------------------------------------------


def test_what_is_there_is_not_fetched_again_and_what_is_damaged_is(fetch, hub: Hub, target: Path) -> None:
    assert fetch(hub, target).returncode == 0
    hub.asked.clear()
    assert fetch(hub, target).returncode == 0
    assert hub.fetched() == {}
    with (target / BIG).open("r+b") as file:
        file.write(b"damage")
    assert fetch(hub, target).returncode == 0
    assert hub.fetched() == {BIG: BIG_BYTES}
    assert names(target) == WANTED


def test_a_killed_fetch_leaves_the_old_model_and_the_next_goes_on(fetch, large: Hub, target: Path) -> None:
    write(target, {"model_index.json": "the old one", _fetch.NOTE: '{"source": "some/model"}'})
    before = contents(target)
    large.slow_after[BIG] = CHUNK_BYTES + 1_000_000
    line, clean = command(large.url, "some/model", "--into", target)
    with subprocess.Popen(line, env=clean, stderr=subprocess.PIPE) as process:
        assert large.reached.wait(60)
        beside = fetch_apart(large, target)
        wait_for(lambda: any(path.stat().st_size for path in target.parent.rglob(f"*{_fetch.PART}")))
        process.send_signal(signal.SIGKILL)
    assert "another scripts/fetch_weights is filling" in beside.stderr
    assert contents(target) == before
    large.slow_after.clear()
    large.asked.clear()
    assert fetch(large, target).returncode == 0
    [big] = [asked for asked in large.asked if asked.path.endswith(BIG)]
    assert big.range == f"bytes={CHUNK_BYTES}-"
    assert large.fetched() == {BIG: LARGE_BYTES - CHUNK_BYTES} | rest(large)
    assert (target / BIG).read_bytes() == large.files("some/model")[BIG]
    assert names(target) == WANTED
    assert {path.name for path in target.parent.iterdir()} == {"weights", "large"}


def rest(hub: Hub) -> dict[str, int]:
    """The files that come after the large one by name."""
    return {name: size for name, size in hub.fetched().items() if name > BIG}


def wait_for(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not true() and time.monotonic() < ends:
        time.sleep(0.02)
    assert true()


def test_a_stopped_fetch_ends_in_order(hub: Hub, target: Path) -> None:
    hub.slow_after[BIG] = 1000
    line, clean = command(hub.url, "some/model", "--into", target)
    with subprocess.Popen(line, env=clean, stderr=subprocess.PIPE, text=True) as process:
        assert hub.reached.wait(60)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 143
    assert "Traceback" not in said
    assert not target.exists()


def test_a_connection_that_is_cut_is_taken_up_in_the_same_run(fetch, large: Hub, target: Path) -> None:
    large.cut_after[BIG] = CHUNK_BYTES + 1
    assert fetch(large, target).returncode == 0
    asked = [item.range for item in large.asked if item.path.endswith(BIG)]
    assert asked == ["", f"bytes={CHUNK_BYTES}-"]


def test_a_server_without_ranges_is_asked_from_the_start(fetch, large: Hub, target: Path) -> None:
    large.ranges = False
    large.cut_after[BIG] = CHUNK_BYTES + 1
    assert fetch(large, target).returncode == 0
    assert (target / BIG).read_bytes() == large.files("some/model")[BIG]


def test_a_part_that_was_damaged_on_the_disk_is_fetched_again(fetch, hub: Hub, pipeline: Path, target: Path) -> None:
    file = _fetch_file(hub, BIG)
    part = _fetch._part(target.parent / ".weights.fetching" / _fetch.MODEL / BIG, file)
    write(part.parent, {part.name: b"zeros where data was, after a power cut"})
    assert fetch(hub, target).returncode == 0
    assert (target / BIG).read_bytes() == (pipeline / BIG).read_bytes()


def _fetch_file(hub: Hub, name: str) -> _fetch.File:
    data = hub.files("some/model")[name]
    return _fetch.File(name, name, "", "sha256", hashlib.sha256(data).hexdigest(), len(data))


def test_what_an_earlier_fetch_of_something_else_left_goes(fetch, hub: Hub, target: Path) -> None:
    write(target.parent / ".weights.fetching" / _fetch.MODEL, {"other/model.safetensors": b"old", BIG: b"old"})
    assert fetch(hub, target).returncode == 0
    assert names(target) == WANTED


# --- What is refused -------------------------------------------------------------------------------------------------


def test_an_unknown_model_or_revision_is_told(fetch, hub: Hub, target: Path) -> None:
    said = refused(fetch, hub, target, model="some/other")
    assert "the model some/other at main was not found" in said
    assert "HF_TOKEN" in said
    said = refused(fetch, hub, target, "--revision", "v9")
    assert "some/model at v9 was not found: there is no such branch, tag or commit" in said
    assert list(target.parent.iterdir()) == []


def test_a_tag_is_resolved(fetch, hub: Hub, target: Path) -> None:
    assert fetch(hub, target, "--revision", "v1").returncode == 0
    assert json.loads((target / _fetch.NOTE).read_text())["commit"] == hub.commit("some/model")


def test_no_network_is_told(target: Path) -> None:
    said = refused(fetch_apart, nobody(), target)
    assert "could not be fetched: ConnectError" in said
    assert "HF_ENDPOINT" in said
    assert "HF_HUB_OFFLINE is set" in refused(fetch_apart, nobody(), target, HF_HUB_OFFLINE="1")


def test_changed_bytes_are_refused(fetch, hub: Hub, target: Path) -> None:
    hub.changed.add("tokenizer/vocab.json")
    said = refused(fetch, hub, target)
    assert "tokenizer/vocab.json came with the digest" in said
    assert "as announced" in said
    hub.changed = {BIG}
    assert f"{BIG} came with the digest" in refused(fetch, hub, target)
    hub.changed.clear()
    assert fetch(hub, target).returncode == 0


def test_what_somebody_else_put_there_is_kept_unless_forced(fetch, hub: Hub, target: Path) -> None:
    write(target, {"notes.txt": "mine"})
    assert "holds files that this command did not fetch; add --force" in refused(fetch, hub, target)
    write(target, {_fetch.NOTE: '{"source": "an/other"}'})
    assert "holds an/other; add --force" in refused(fetch, hub, target)
    assert hub.asked == [], "nothing is asked for a target that is refused"
    assert fetch(hub, target, "--force").returncode == 0
    assert names(target) == WANTED


def test_a_file_in_the_way_is_told(fetch, hub: Hub, target: Path) -> None:
    target.write_text("a file")
    assert "is not a directory" in fetch(hub, target).stderr
    assert target.read_text() == "a file"


def test_a_place_that_cannot_be_written_is_told(fetch, hub: Hub, tmp_path: Path) -> None:
    said = refused(fetch, hub, Path("/proc/weights"))
    assert "/proc/weights cannot be written" in said
    assert "--into" in said


def test_a_full_disk_is_told_before_anything_is_fetched(
    hub: Hub, target: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = _fetch_file(hub, BIG)
    monkeypatch.setattr(_fetch.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, BIG_BYTES - 1))
    with pytest.raises(_fetch.FetchError, match=rf"{BIG_BYTES:,} bytes are to be fetched"):
        _fetch.check_room(tmp_path, [file], [])
    write(tmp_path, {_fetch._part(Path(BIG), file).as_posix(): b"1"})
    _fetch.check_room(tmp_path, [file], [])


def test_a_link_stays_and_what_it_leads_to_is_replaced(fetch, hub: Hub, target: Path, tmp_path: Path) -> None:
    real = tmp_path / "disk" / "real"
    real.mkdir(parents=True)
    target.symlink_to(real)
    assert fetch(hub, target).returncode == 0
    assert target.is_symlink()
    assert names(real) == WANTED
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "weights"}


def test_a_name_that_leads_outside_is_refused(fetch, hub: Hub, target: Path, pipeline: Path, monkeypatch) -> None:
    hub.files("some/model")
    hub._files[pipeline] = {"../evil.json": b"{}", **hub._files[pipeline]}
    assert "lists a file '../evil.json'" in refused(fetch, hub, target)


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        ("weights", [], "neither a hub id"),
        ("https://example.org/model.tar", [], "give the archive's digest"),
        ("a/b", ["--sha256", "0" * 64], "--sha256 is for a URL"),
    ],
)
def test_wrong_usage_is_told(
    fetch, hub: Hub, target: Path, capsys: pytest.CaptureFixture[str], model: str, arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        fetch(hub, target, *arguments, model=model)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
    assert hub.asked == []


# --- The step in which the directory is replaced ---------------------------------------------------------------------


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C library, or a file system, that cannot let two directories change places."""
    monkeypatch.setattr(_fetch.ctypes, "CDLL", lambda _: object())


def test_elsewhere_two_renames_do(no_exchange: None, target: Path) -> None:
    write(target, {"old.json": "old"})
    with _fetch.staging(target) as staging:
        write(staging / _fetch.MODEL, {"new.json": "new"})
        _fetch.put_in_place(staging / _fetch.MODEL, staging, target, {"source": "new"})
    assert names(target) == {"new.json"}
    assert [path.name for path in target.parent.iterdir()] == ["weights"]


def test_a_kill_between_them_is_healed_by_the_next_fetch(target: Path) -> None:
    write(_fetch._aside(target), {"old.json": "old"})
    with _fetch.staging(target):
        assert names(target) == {"old.json"}


def test_a_directory_that_went_into_place_before_it_was_locked_is_not_held(target: Path, monkeypatch) -> None:
    place = target.parent / ".weights.fetching"
    real, meanwhile = _fetch.fcntl.flock, iter([lambda: place.rename(target)])

    def flock(holder: int, operation: int) -> None:
        next(meanwhile, lambda: None)()
        real(holder, operation)

    monkeypatch.setattr(_fetch.fcntl, "flock", flock)
    holder = _fetch._hold(place)
    assert os.fstat(holder).st_ino == place.stat().st_ino != target.stat().st_ino
    os.close(holder)


def test_a_target_that_cannot_be_replaced_stays(no_exchange: None, target: Path, monkeypatch) -> None:
    write(target, {"old.json": "old"})
    real = Path.rename

    def rename(self: Path, to: Path) -> Path:
        if to == target and self.name == _fetch.MODEL:
            raise OSError(16, "Device or resource busy")
        return real(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    with _fetch.staging(target) as staging, pytest.raises(_fetch.FetchError, match=r"cannot be replaced .*busy"):
        _fetch.put_in_place(staging / _fetch.MODEL, staging, target, {})
    assert names(target) == {"old.json"}


# --- Archives --------------------------------------------------------------------------------------------------------


def packed(pipeline: Path, kind: str) -> bytes:
    if kind == "zip":
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for name in sorted(contents(pipeline)):
                archive.write(pipeline / name, f"model/{name}")
        return stream.getvalue()
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.add(pipeline, "." if kind == "tar" else "model")
    data = stream.getvalue()
    return {"tar": data, "tar.gz": gzip.compress(data, 1), "tar.zst": zstandard.compress(data)}[kind]


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "tar.zst", "zip"])
def test_an_archive_is_fetched_by_its_digest(fetch, pipeline: Path, target: Path, tmp_path: Path, kind: str) -> None:
    data = packed(pipeline, kind)
    write(tmp_path / "files", {f"model.{kind}": data})
    with Hub({"files/here": tmp_path / "files"}) as hub:
        url = f"{hub.url}/files/here/resolve/main/model.{kind}"
        said = refused(fetch, hub, target, "--sha256", "0" * 64, model=f"{url}?signature=secret")
        assert "came with the digest" in said
        digest = hashlib.sha256(data).hexdigest()
        done = fetch(hub, target, "--sha256", digest, model=f"{url}?signature=secret", HF_TOKEN="hf_secret")
        assert done.returncode == 0, done.stderr
        assert {asked.authorization for asked in hub.asked} == {""}, "a token is the hub's"
    assert names(target) == WANTED
    assert "secret" not in (target / _fetch.NOTE).read_text()
    assert [path.name for path in target.parent.iterdir() if path.name != "files"] == ["weights"]


def test_what_is_no_archive_is_told(fetch, target: Path, tmp_path: Path) -> None:
    write(tmp_path / "files", {"model.tar": b"<html>not found</html>"})
    with Hub({"files/here": tmp_path / "files"}) as hub:
        url = f"{hub.url}/files/here/resolve/main/model.tar"
        digest = hashlib.sha256(b"<html>not found</html>").hexdigest()
        assert "cannot be unpacked" in refused(fetch, hub, target, "--sha256", digest, model=url)


@pytest.mark.parametrize("old_python", [False, True])
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_an_archive_cannot_write_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old_python: bool, kind: bytes
) -> None:
    if old_python:  # before 3.11.4
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    item = tarfile.TarInfo("../evil" if kind == tarfile.REGTYPE else "evil")
    item.type, item.linkname = kind, "/etc/hostname"
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(item)
    write(tmp_path, {"evil.tar": stream.getvalue()})
    with pytest.raises(_fetch.FetchError, match="cannot be unpacked"):
        _fetch.unpack(tmp_path / "evil.tar", tmp_path / "unpacked")
    assert not (tmp_path / "evil").exists()


def test_an_archive_is_unpacked_by_a_python_without_a_filter(
    pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    write(tmp_path, {"model.tar.zst": packed(pipeline, "tar.zst")})
    assert names(_fetch.unpack(tmp_path / "model.tar.zst", tmp_path / "unpacked")) == names(pipeline)

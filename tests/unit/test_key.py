"""The key: what is in it, what never is, and that it explains itself."""

import hashlib
import json
import re
import struct
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from artifacts import ROOT, fill

from warmstart import key as keys
from warmstart.key import (
    Key,
    KeyFactError,
    compiler_trouble,
    compiler_version,
    cpu_flags,
    cpu_vendor,
    differ_in_compiler,
    difference,
    environment_facts,
    lacks_compiler,
    model_version,
    nearest,
    ranked,
    source_digest,
)

# --- Digests ---------------------------------------------------------------------------------------------------------


def test_a_digest_is_of_sorted_lines() -> None:
    one = Key({"b": "2", "a": "1"}, {"x": "y"})
    assert one.environment_digest == hashlib.sha256(b"a=1\nb=2\n").hexdigest()
    assert one.version_digest == hashlib.sha256(b"x=y\n").hexdigest()
    assert one.environment_digest == Key({"a": "1", "b": "2"}, {}).environment_digest


def test_a_change_of_one_part_leaves_the_other() -> None:
    one, two = Key({"a": "1"}, {"x": "1"}), Key({"a": "1"}, {"x": "2"})
    assert one.environment_digest == two.environment_digest
    assert one.version_digest != two.version_digest


def test_no_value_can_pretend_to_be_two_facts() -> None:
    values = ["1\nb=2", "1\\nb=2", "1\\\nb=2", "1\\\\nb=2", "1"]
    assert len({Key({"a": value}, {}).environment_digest for value in values}) == len(values)
    assert Key({"a": "1\nb=2"}, {}).environment_digest != Key({"a": "1", "b": "2"}, {}).environment_digest


@pytest.mark.parametrize("value", ["", "  ", "\n", None, 7, True, b"x"])
@pytest.mark.parametrize("part", [0, 1])
def test_an_empty_fact_is_an_error_that_names_it(value: object, part: int) -> None:
    facts: list[dict[str, str]] = [{"torch": "2.13"}, {"dtype": "bf16"}]
    facts[part]["attention backend"] = value  # type: ignore[assignment]
    with pytest.raises(KeyFactError, match=f"'attention backend' is {re.escape(repr(value))}"):
        Key(*facts)


@pytest.mark.parametrize("label", ["", "a=b", "a\nb", 7])
def test_a_label_that_would_be_ambiguous_is_an_error(label: str) -> None:
    with pytest.raises(KeyFactError, match="label"):
        Key({label: "x"}, {})


# --- The environment -------------------------------------------------------------------------------------------------


def test_the_facts_of_this_machine() -> None:
    facts = environment_facts(device="cpu", threads=3)
    assert Key(facts, {}).environment_digest
    assert facts["cpu threads"] == "3"
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", facts["torch"])
    assert re.fullmatch(r"[0-9a-f]{40}", facts["torch git"])
    assert facts["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"
    assert facts["glibc"].startswith("glibc 2.")
    assert set(facts) == {
        "format", "machine", "python", "glibc", "torch", "torch git", "cuda runtime", "triton", "device", "cpu vendor",
        "cpu flags", "cpu threads", "c++ compiler",
    }  # fmt: skip


def test_the_facts_agree_with_torch_and_need_no_import_of_it() -> None:
    code = (
        "import sys; from warmstart.key import environment_facts; facts = environment_facts(device='cpu', threads=1);"
        "early = 'torch' in sys.modules; import torch; v = torch.version;"
        "print(early, facts['torch'] == v.__version__, facts['torch git'] == v.git_version,"
        " facts['cuda runtime'] == (v.cuda or 'none'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False True True True\n"


def test_no_fact_tells_where_or_who() -> None:
    import getpass
    import socket

    text = json.dumps(environment_facts(device="cpu", threads=2))
    for secret in (socket.gethostname(), str(ROOT), str(Path.home()), sys.prefix, f"/{getpass.getuser()}"):
        assert secret not in text


def test_a_machine_without_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KeyFactError, match="Install torch"):
        environment_facts(device="cpu", threads=1)


def torch_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> dict[str, str]:
    fill(tmp_path, {"torch/version.py": text.encode()})
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path / "torch")])
    monkeypatch.setattr(keys.importlib.util, "find_spec", lambda name: spec)
    return environment_facts(device="cpu", threads=1)


def test_a_cuda_build_of_torch_says_its_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\ngit_version = 'abc'\nhip = None\n"
    facts = torch_version(tmp_path, monkeypatch, text)
    assert (facts["torch"], facts["cuda runtime"], facts["torch git"]) == ("2.13.0+cu130", "13.0", "abc")


def test_a_broken_torch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyFactError, match=r"version\.py cannot be read \(SyntaxError\)"):
        torch_version(tmp_path, monkeypatch, "cuda = = 1")


X86 = "flags\t\t: fpu sse sse2 ssse3 pni fma avx avx2 avx512f avx512_vnni amx_tile bmi1 f16c aes md_clear ibrs vmx ht"


def test_cpu_flags_are_instruction_sets_only(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text(f"processor\t: 0\n{X86}\nbugs\t\t: spectre_v2\nprocessor\t: 1\nflags\t\t: avx10\n")
    flags = "aes amx_tile avx avx2 avx512_vnni avx512f bmi1 f16c fma pni sse sse2 ssse3"
    assert cpu_flags(tmp_path / "x86") == flags
    (tmp_path / "arm").write_text("Features\t: fp asimd evtstrm sve2 bf16 cpuid ssbs paca\n")
    assert cpu_flags(tmp_path / "arm") == "asimd bf16 fp sve2"


def test_the_maker_of_a_processor_is_named_by_x86_alone(tmp_path: Path) -> None:
    (tmp_path / "x86").write_text(f"processor\t: 0\nvendor_id\t: AuthenticAMD\n{X86}\nvendor_id\t: Other\n")
    (tmp_path / "arm").write_text("CPU implementer\t: 0x41\nFeatures\t: fp asimd\n")
    (tmp_path / "said nothing").write_text(f"vendor_id\t:\n{X86}\n")
    found = {path.name: cpu_vendor(path) for path in tmp_path.iterdir()}
    assert found == {"x86": "AuthenticAMD", "arm": "unknown", "said nothing": "unknown"}
    assert cpu_vendor(tmp_path / "absent") == "unknown"


def test_other_mitigations_are_the_same_cpu_and_other_vectors_are_not(tmp_path: Path) -> None:
    (tmp_path / "old").write_text(X86)
    (tmp_path / "patched").write_text(X86.replace("ibrs", "ibrs ibpb stibp flush_l1d"))
    (tmp_path / "small").write_text(X86.replace("avx512f avx512_vnni", ""))
    assert cpu_flags(tmp_path / "old") == cpu_flags(tmp_path / "patched") != cpu_flags(tmp_path / "small")


def test_a_cpu_that_says_nothing_is_unknown_with_its_reason(tmp_path: Path) -> None:
    assert cpu_flags(tmp_path / "absent") == "unknown: No such file or directory"
    (tmp_path / "empty").write_text("processor: 0\n")
    assert cpu_flags(tmp_path / "empty").startswith("unknown: no flags")


def compiler(tmp_path: Path, name: str, says: str, status: int = 0) -> str:
    path = tmp_path / name
    path.write_text(f"#!/bin/sh\necho '{says}'\necho more\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def test_the_compiler_is_the_one_that_torch_would_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clang = compiler(tmp_path, "my-clang", "Debian clang version 14.0.6")
    assert compiler_version(clang) == "Debian clang version 14.0.6"
    assert compiler_trouble(clang) == ""
    # Torch looks for nothing else where CXX is set, and for g++ alone where it is not.
    compiler(tmp_path, "clang++", "Debian clang version 14.0.6")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_version() == "none"
    compiler(tmp_path, "g++", "g++ (Debian 12.2.0-14) 12.2.0")
    monkeypatch.setenv("PATH", f"{tmp_path}:/none")
    assert compiler_version() == "gcc (Debian 12.2.0-14) 12.2.0"
    assert compiler_version("/nowhere/g++") == "none"
    assert compiler_version(f"{clang} -m64") == "none"


def test_gcc_under_two_names_is_one_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, "g++", "g++ (Debian 12.2.0-14) 12.2.0")
    other = compiler(tmp_path, "x86_64-linux-gnu-g++-12", "x86_64-linux-gnu-g++-12 (Debian 12.2.0-14) 12.2.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler_version() == compiler_version(other) == "gcc (Debian 12.2.0-14) 12.2.0"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (None, "CXX is not set, and g++ is not on PATH; install g++, or set CXX"),
        ("clang++-99", "CXX is 'clang++-99', which is not on PATH"),
        ("/nowhere/g++", "which cannot be run (No such file or directory)"),
        ("ccache g++", "is more than the name of a program, and torch takes it for one; leave out its options"),
        ("{}/fails", "which fails when asked for its version"),
        ("{}/silent", "which fails when asked for its version"),
        ("{}/hangs", "did not tell its version in 1 s"),
        ("{}/locked", "which cannot be run (Permission denied)"),
    ],
)
def test_no_compiler_is_none_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str | None, words: str
) -> None:
    monkeypatch.setattr(keys, "COMPILER_TIMEOUT_S", 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler(tmp_path, "fails", "g++ 12", status=1)
    for name, line, mode in (("silent", "", 0o755), ("hangs", "exec /bin/sleep 600", 0o755), ("locked", "", 0o644)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(mode)
    command = command and command.format(tmp_path)
    assert compiler_version(command) == "none"
    assert words in compiler_trouble(command)
    assert lacks_compiler({"c++ compiler": compiler_version(command)})


def test_a_gpu_lacks_no_compiler_and_only_the_compiler_may_differ() -> None:
    assert not lacks_compiler({"device": "NVIDIA H200"})
    here = {"device": "cpu", "c++ compiler": "none"}
    assert differ_in_compiler(here, {"device": "cpu", "c++ compiler": "gcc 12"})
    assert not differ_in_compiler(here, here)
    assert not differ_in_compiler(here, {"device": "cpu", "c++ compiler": "gcc 12", "cpu flags": "avx2"})


# --- GPUs, as NVML describes them ------------------------------------------------------------------------------------


class NVMLError(Exception):
    """Stands for pynvml's."""


@dataclass
class Gpu:
    """What NVML answers for one device; the defaults are an H100 PCIe's."""

    name: str = "NVIDIA H100 PCIe"
    uuid: str = "GPU-11111111-1111-1111-1111-111111111111"
    capability: tuple[int, int] = (9, 0)
    cores: int = 14592
    slices: "list[Slice]" = field(default_factory=list)
    knows_mig: bool = True


@dataclass
class Slice:
    """A MIG slice of a GPU."""

    uuid: str
    multiprocessorCount: int  # noqa: N815 - NVML's names
    memorySizeMB: int  # noqa: N815
    gpu: Gpu | None = None


H100_SXM = Gpu("NVIDIA H100 80GB HBM3", "GPU-22222222-2222-2222-2222-222222222222", cores=16896)
T4 = Gpu("Tesla T4", "GPU-33333333-3333-3333-3333-333333333333", (7, 5), 2560, knows_mig=False)


def sliced() -> Gpu:
    slices = [Slice("MIG-aaaa", 16, 9856), Slice("MIG-bbbb", 60, 40192)]
    gpu = Gpu("NVIDIA H100 80GB HBM3", "GPU-44444444-4444-4444-4444-444444444444", cores=16896, slices=slices)
    for one in slices:
        one.gpu = gpu
    return gpu


def refuse(*_: object) -> None:
    raise NVMLError("Not Supported")


def fake_nvml(gpus: list[Gpu], driver: str | bytes) -> types.ModuleType:
    nvml = types.ModuleType("pynvml")
    everything = {one.uuid: one for gpu in gpus for one in (gpu, *gpu.slices)}

    def by_uuid(uuid: str) -> Gpu | Slice:
        if uuid not in everything:
            raise NVMLError("Not Found")
        return everything[uuid]

    def of_gpu_only(ask: Callable[[Gpu], object]) -> Callable[[object], object]:
        return lambda handle: ask(handle) if isinstance(handle, Gpu) else refuse()

    vars(nvml).update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: driver,
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetMigMode=of_gpu_only(lambda gpu: (int(bool(gpu.slices)),) * 2 if gpu.knows_mig else refuse()),
        nvmlDeviceGetMigDeviceHandleByIndex=lambda gpu, index: gpu.slices[index],
        nvmlDeviceIsMigDeviceHandle=lambda handle: isinstance(handle, Slice),
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda handle: handle.gpu,
        nvmlDeviceGetName=of_gpu_only(lambda gpu: gpu.name),
        nvmlDeviceGetCudaComputeCapability=of_gpu_only(lambda gpu: gpu.capability),
        nvmlDeviceGetNumGpuCores=of_gpu_only(lambda gpu: gpu.cores),
        nvmlDeviceGetAttributes=lambda handle: handle if isinstance(handle, Slice) else refuse(),
    )
    return nvml


Describe = Callable[..., dict[str, str]]


@pytest.fixture
def describe(monkeypatch: pytest.MonkeyPatch) -> Describe:
    def with_gpus(
        *gpus: Gpu, driver: str | bytes = "570.86.10", device: str = "cuda", visible: str | None = None
    ) -> dict[str, str]:
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(list(gpus), driver))
        return environment_facts(device=device, threads=1, visible_devices=visible)

    return with_gpus


def test_a_gpu_is_described_and_the_cpu_is_not(describe: Describe) -> None:
    facts = describe(Gpu())
    assert {label: facts[label] for label in facts if label.startswith("device")} == {
        "device": "NVIDIA H100 PCIe", "device capability": "9.0", "device driver": "570.86.10",
        "device cores": "14592", "device mig": "no",
    }  # fmt: skip
    assert "cpu flags" not in facts
    assert Key(facts, {}).environment_digest


def test_what_makes_another_gpu_makes_another_key(describe: Describe) -> None:
    seen = [describe(Gpu()), describe(H100_SXM), describe(sliced()), describe(T4), describe(Gpu(), driver="580.1")]
    seen += [describe(Gpu(cores=1)), describe(sliced(), visible="MIG-bbbb")]
    assert len({Key(facts, {}).environment_digest for facts in seen}) == len(seen)


def test_the_same_kind_of_gpu_elsewhere_has_the_same_key(describe: Describe) -> None:
    other = Gpu(uuid="GPU-99999999-9999-9999-9999-999999999999")
    assert describe(Gpu()) == describe(T4, other, device="cuda:1") == describe(T4, other, visible="1,0")
    assert describe(Gpu()) == describe(Gpu(), driver=b"570.86.10")


@pytest.mark.parametrize(
    ("device", "visible", "name"),
    [
        ("cuda", None, "Tesla T4"),
        ("cuda", "", "Tesla T4"),
        ("cuda:0", "1", "NVIDIA H100 PCIe"),
        ("cuda:1", "1, 0", "Tesla T4"),
        ("cuda:1", None, "NVIDIA H100 PCIe"),
        ("cuda:0", "GPU-11111111-1111-1111-1111-111111111111", "NVIDIA H100 PCIe"),
    ],
)
def test_visible_devices_are_respected(describe: Describe, device: str, visible: str | None, name: str) -> None:
    assert describe(T4, Gpu(), device=device, visible=visible)["device"] == name


def test_a_slice_is_told_from_the_whole_and_from_other_slices(describe: Describe) -> None:
    first = describe(sliced())
    assert first["device mig"] == "16 multiprocessors, 9856 MB"
    assert first["device"] == "NVIDIA H100 80GB HBM3"
    assert describe(sliced(), visible="MIG-bbbb")["device mig"] == "60 multiprocessors, 40192 MB"
    assert describe(sliced(), visible="MIG-aaaa") == first


@pytest.mark.parametrize(
    ("device", "visible", "reason"),
    [("cuda:7", None, "index"), ("cuda", "GPU-0", "Not Found"), ("cuda:3", "0", "index"), ("cuda:x", None, "invalid")],
)
def test_a_gpu_that_is_not_there_is_unknown_and_says_why(
    describe: Describe, device: str, visible: str | None, reason: str
) -> None:
    facts = describe(Gpu(), device=device, visible=visible)
    assert facts["device"].startswith("unknown: ")
    assert reason in facts["device"]
    assert Key(facts, {}).environment_digest, "unknown is a fact"


def test_without_nvml_the_gpu_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py cannot be imported" in environment_facts(device="cuda", threads=1)["device driver"]
    broken = fake_nvml([], "1")
    vars(broken)["nvmlInit"] = lambda: refuse()
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    assert environment_facts(device="cuda", threads=1)["device"] == "unknown: Not Supported"


# --- The model's version ---------------------------------------------------------------------------------------------


def safetensors(tensors: dict[str, object], data: bytes = b"", length: int | None = None) -> bytes:
    header = json.dumps(tensors).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
MODEL = {
    "model_index.json": b'{"_class_name": "FluxPipeline", "_name_or_path": "/somewhere"}',
    "transformer/config.json": b'{"num_layers": 2, "_name_or_path": "here"}',
    "transformer/model.safetensors": safetensors({"w": TENSOR, "__metadata__": {"by": "x"}}, b"01234567"),
    "pipeline.py": b"x = 1\n",
    "README.md": b"readme",
}


def version(tmp_path: Path, **changes: bytes | None) -> str:
    """The version of the model with some files changed or, by None, left out; `__` stands for a slash."""
    files = MODEL | {name.replace("__", "/").replace("-", "."): content for name, content in changes.items()}
    root = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
    return model_version(fill(root, {name: content for name, content in files.items() if content is not None}))


SAME: dict[str, dict[str, bytes | None]] = {
    "elsewhere": {},
    "other weights": {"transformer__model-safetensors": safetensors({"w": TENSOR}, b"76543210")},
    "spaces and order": {"transformer__config-json": b'\xef\xbb\xbf{ "num_layers" : 2 }'},
    "where it was loaded from": {"model_index-json": b'{"_name_or_path": "/else", "_class_name": "FluxPipeline"}'},
    "readme": {"README-md": b"other"},
    "vocabulary": {"tokenizer__tokenizer-json": b'"' + b"x" * (1 << 20) + b'"'},
    "book-keeping": {"-cache__huggingface__x-json": b'{"date": 1}', "transformer__-x-json": b"{"},
}
OTHER: dict[str, dict[str, bytes | None]] = {
    "config": {"transformer__config-json": b'{"num_layers": 3}'},
    "dtype": {"transformer__model-safetensors": safetensors({"w": TENSOR | {"dtype": "BF16"}}, b"01234567")},
    "shape": {"transformer__model-safetensors": safetensors({"w": TENSOR | {"shape": [1, 2]}}, b"01234567")},
    "name": {"transformer__model-safetensors": safetensors({"v": TENSOR}, b"01234567")},
    "code": {"pipeline-py": b"x = 2\n"},
    "file moved": {"transformer__config-json": None, "vae__config-json": MODEL["transformer/config.json"]},
    "file gone": {"pipeline-py": None},
    "more weights": {"vae__model-safetensors": safetensors({"w": TENSOR}, b"01234567")},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME.keys())
def test_what_decides_no_graph_leaves_the_version(tmp_path: Path, changes: dict[str, bytes | None]) -> None:
    assert version(tmp_path, **changes) == version(tmp_path)


@pytest.mark.parametrize("changes", OTHER.values(), ids=OTHER.keys())
def test_what_decides_graphs_changes_the_version(tmp_path: Path, changes: dict[str, bytes | None]) -> None:
    assert version(tmp_path, **changes) != version(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it has 0 bytes"),
        (b"1234567", "it has 7 bytes"),
        (safetensors({"w": TENSOR})[:30], "promises a header of"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer"),
        (safetensors({"w": TENSOR}, b"0123"), "it holds 4 bytes of tensors where its header promises 8"),
        (safetensors({"w": TENSOR}, b"01234567", length=5), "not JSON"),
        (struct.pack("<Q", 3) + b"[1]", "not a JSON object"),
        (safetensors({"w": {"dtype": "F32"}}, b""), "lacks a dtype, shape or offset"),
        (safetensors({"w": 7}, b""), "lacks a dtype, shape or offset"),
        (safetensors({"w": TENSOR | {"data_offsets": ["a", "b"]}}, b""), "lacks a dtype, shape or offset"),
    ],
)
def test_a_file_that_is_not_whole_is_an_error(tmp_path: Path, content: bytes, says: str) -> None:
    with pytest.raises(KeyFactError, match=re.escape(says)) as caught:
        version(tmp_path, **{"transformer__model-safetensors": content})
    assert str(caught.value).startswith("model.safetensors is not a whole safetensors file")
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 50_000])
def test_a_broken_config_is_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(KeyFactError, match=r"config\.json is not JSON"):
        version(tmp_path, **{"transformer__config-json": content})


def test_a_directory_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyFactError, match="WARMSTART_MODEL_VERSION"):
        model_version(fill(tmp_path, {"README.md": b"x"}))
    with pytest.raises(KeyFactError, match="holds no"):
        model_version(tmp_path / "absent")


def test_no_gigabytes_are_read(tmp_path: Path) -> None:
    tensor = TENSOR | {"shape": [1 << 34], "data_offsets": [0, 1 << 36]}
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors({"w": tensor}))
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + (1 << 36))  # 64 GiB, sparse
    assert model_version(tmp_path)


def test_source_is_digested_by_content_wherever_it_lies(tmp_path: Path) -> None:
    one = fill(tmp_path / "one", {"a.py": b"a", "b.py": b"b"})
    two = fill(tmp_path / "two", {"y/a.py": b"a", "x/b.py": b"b"})
    digest = source_digest([one / "a.py", one / "b.py"])
    assert digest == source_digest([two / "x/b.py", two / "y/a.py"])
    fill(one, {"b.py": b"c"})
    assert digest != source_digest([one / "a.py", one / "b.py"])
    fill(one, {"a.py": b"ac", "b.py": b""})
    assert source_digest([one / "a.py", one / "b.py"]) != source_digest([fill(one, {"c.py": b"ac"}) / "c.py"])


# --- In words --------------------------------------------------------------------------------------------------------


def test_the_same_is_the_same() -> None:
    assert difference({"a": "1"}, {"a": "1"}) == "the same"


def test_a_difference_names_both_values_and_counts_the_rest() -> None:
    here = {"dtype": "bf16", "mode": "default", "same": "x", "only": "1", "z": "1", "y": "1"}
    there = {"dtype": "fp32", "mode": "max-autotune", "same": "x", "other": "2", "z": "2", "y": "2"}
    assert difference(here, there) == (
        'dtype is "bf16" here, "fp32" there; mode is "default" here, "max-autotune" there;'
        ' only is "1" here, absent there; ...and 3 more'
    )
    assert 'other is absent here, "2" there' in difference(here, there, limit=9)


def test_flags_are_told_by_what_is_missing() -> None:
    ours, theirs = "avx avx2 fma sse sse2", "avx avx2 avx512bw avx512f fma sse sse2"
    assert difference({"cpu flags": ours}, {"cpu flags": theirs}) == "cpu flags here lacks avx512bw avx512f"
    assert difference({"f": theirs}, {"f": ours}) == "f here adds avx512bw avx512f"
    both = difference({"f": ours + " xop"}, {"f": theirs})
    assert both == "f here lacks avx512bw avx512f and adds xop"
    many = " ".join(["avx", "fma", *(f"x{number}" for number in range(10, 20))])
    text = difference({"f": "avx fma sse sse2"}, {"f": many})
    assert text == "f here lacks x10 x11 x12 x13 x14 x15 and 4 more and adds sse sse2"


def test_long_values_are_cut_to_what_differs() -> None:
    digests = "a" * 64, "b" * 64
    assert difference({"model": digests[0]}, {"model": digests[1]}) == f'model is "{"a" * 12}" here, "{"b" * 12}" there'
    text = difference({"plan": "x" * 200 + "one"}, {"plan": "x" * 200 + "two"})
    assert "one" in text
    assert "two" in text
    assert len(text) < 120


def test_nearest_is_the_one_with_the_fewest_differences() -> None:
    here = Key({"device": "cpu", "torch": "2"}, {"dtype": "bf16", "mode": "m"})
    far = Key({"device": "gpu", "torch": "1"}, {"dtype": "fp32", "mode": "n"})
    near = Key({"device": "cpu", "torch": "2"}, {"dtype": "fp32", "mode": "m"})
    found = nearest(here, [far, near])
    assert found == (near, 'version: dtype is "bf16" here, "fp32" there')
    assert nearest(here, []) is None
    assert nearest(here, [far, here]) == (here, "the same")
    told = nearest(here, [far])
    assert told is not None
    assert told[1].startswith('environment: device is "cpu" here, "gpu" there; torch')
    assert '. version: dtype is "bf16" here' in told[1]


def test_of_two_equally_near_the_same_environment_is_nearer() -> None:
    here = Key({"device": "cpu"}, {"dtype": "bf16"})
    same_machine, same_model = Key({"device": "cpu"}, {"dtype": "x"}), Key({"device": "x"}, {"dtype": "bf16"})
    for order in ([same_machine, same_model], [same_model, same_machine]):
        found = nearest(here, order)
        assert found is not None
        assert found[0] == same_machine


def test_keys_are_ranked_by_how_much_differs():
    here = Key({"gpu": "A"}, {"dtype": "bf16", "mode": "default"})
    near, far = (
        Key({"gpu": "A"}, {"dtype": "fp32", "mode": "default"}),
        Key({"gpu": "B"}, {"dtype": "bf16", "mode": "x"}),
    )
    assert ranked(here, [far, near]) == [
        (near, 'version: dtype is "bf16" here, "fp32" there'),
        (far, 'environment: gpu is "A" here, "B" there. version: mode is "default" here, "x" there'),
    ]

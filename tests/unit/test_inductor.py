"""What is asked of TorchInductor from outside, where it may refuse."""

import pytest
from torch._inductor import codecache

from warmstart import inductor


def test_a_header_that_cannot_be_precompiled_is_left_out_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def full(header: str, command: str, **_: object) -> str:
        asked.append(header)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(codecache, "_precompile_header", full)
    inductor.tolerate_headers()
    assert [codecache._precompile_header("a.h", "g++", shared=True) for _ in range(2)] == ["", ""]
    assert asked == ["a.h"], "what failed is not tried for each kernel again"


def test_torch_takes_an_empty_name_for_no_header() -> None:
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    options = CppTorchDeviceOptions(device_type="cpu")
    plain = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
    options.precompiled_header = ""
    assert CppBuilder(name="o", sources="i", BuildOption=options).get_command_line() == plain

"""What a boot does, in what order, when a compile fails: blames the cache once at most, and always comes to an end."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from warmstart import boot as boot_function
from warmstart import notes
from warmstart.live import LiveDirectory

# The package has the function of that name in place of the module.
boot_module = sys.modules[boot_function.__module__]


def climb(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    always: str = "",
    restored: bool,
    noted: str = "",
    trouble: str = "",
    nowhere: bool = False,
) -> tuple[str, list[str], list[str]]:
    """Goes on after a failure. Returns what is still wrong, what was tried, and what is noted afterwards.

    Args:
        always: letters of the parts of "abc" that break, each attempt the first of them that still serves; of none the
            attempt breaks elsewhere.
        restored: whether there was something to blame.
        noted: the parts that an earlier boot noted.
        trouble: what is wrong with the compiler.
        nowhere: whether there is no other directory.
    """
    from warmstart.regions import Part, Region

    live = tmp_path / "live"
    live.mkdir()
    for part in noted:
        notes.add(live, boot_module._FAILING, part)
    here = object.__new__(boot_module._Boot)
    here.parts = [Part(name, [Region(name, "Block", [])], "found") for name in "abc"]
    here.live, here.warnings, here.found, here.trouble = LiveDirectory(live, ""), [], restored, trouble
    tried: list[str] = []

    def attempt(served: object, live: LiveDirectory, *, goes_on: bool = False) -> str:
        tried.append("on" if goes_on else "first")
        for region in here.regions:
            if region.part in always and not region.failed:
                region.broke = True
                return "no"
        return "" if always else "elsewhere"

    def attempt_cold(served: object, live: LiveDirectory, broken_by: str) -> str:
        if nowhere:
            return "no other place"
        tried.append("cold")
        here.found = False
        for region in here.regions:
            region.forget()
        cause = attempt(served, live, goes_on=False)
        tried.pop()
        return cause

    monkeypatch.setattr(here, "_attempt", attempt)
    monkeypatch.setattr(here, "_attempt_cold", attempt_cold)
    monkeypatch.setattr(here, "_save_soon", lambda: None)
    cause = here._without_what_fails(SimpleNamespace(), attempt(None, here.live))
    return cause, tried, sorted(notes.read(live, boot_module._FAILING))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        # Nothing to blame: it is left out, and noted.
        ({"always": "b", "restored": False}, ("", ["first", "on"], ["b"])),
        ({"always": "ac", "restored": False}, ("", ["first", "on", "on"], ["a", "c"])),
        # Something to blame: blamed once, and never again.
        ({"always": "b", "restored": True}, ("", ["first", "cold", "on"], ["b"])),
        ({"always": "b", "restored": True, "noted": "b"}, ("", ["first", "on"], ["b"])),
        ({"always": "ac", "restored": True, "noted": "a"}, ("", ["first", "on", "cold", "on"], ["a", "c"])),
        # All fail: the model as a whole runs uncompiled.
        ({"always": "abc", "restored": True, "noted": "abc"}, ("no", ["first", "on", "on"], ["a", "b", "c"])),
        ({"always": "abc", "restored": False}, ("no", ["first", "on", "on"], ["a", "b", "c"])),
        # No part is guilty.
        ({"restored": False}, ("elsewhere", ["first"], [])),
        ({"restored": True, "noted": "abc"}, ("elsewhere", ["first", "cold"], ["a", "b", "c"])),
        # Of a machine whose compiler is broken, and one that could not compile without the cache, nothing is noted.
        ({"always": "b", "restored": False, "trouble": "no g++"}, ("", ["first", "on"], [])),
        ({"always": "b", "restored": True, "nowhere": True}, ("", ["first", "on"], [])),
    ],
)
def test_what_is_tried_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict, expected: tuple[str, list[str], list[str]]
) -> None:
    assert climb(tmp_path, monkeypatch, **case) == expected

"""What a boot does, in what order, when a compile fails: blames the cache once at most, and always comes to an end."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from warmstart import boot as boot_function
from warmstart import notes
from warmstart.live import LiveDirectory
from warmstart.regions import Part, Region

# The package has the function of that name in place of the module.
boot_module = sys.modules[boot_function.__module__]
NO, DAMAGED, ELSEWHERE = "it differs by 0.25", "ImportError: /tmp/x.so: no segments", "out of memory"


def failure(part: str, how: str = "it differs by") -> str:
    return json.dumps([part, how])


class Ended(NamedTuple):
    cause: str
    tried: list[str]
    noted: list[str]
    """In the directory in which the boot ended."""
    verdict: str
    """What was said of what had been restored."""


class Ladder:
    """A boot whose attempts end as they are told to.

    Args:
        always: letters of the parts of "abc" that always break; each attempt meets the first of them that still serves.
        damaged: of those that break where something restored is used, and before the others.
        restored: whether there is something to blame.
        noted: of those that an earlier boot has noted, as breaking in the way of `always`.
        trouble: what is wrong with the compiler.
        nowhere: whether there is no other directory.
        elsewhere: where an attempt breaks, but for all parts: "restored", "always" or "".
    """

    def __init__(self, place: Path, **case) -> None:
        self.case = {"always": "", "damaged": "", "noted": "", "trouble": "", "nowhere": False, "elsewhere": ""} | case
        self.tried: list[str] = []
        self.verdict = ""
        self.place = place
        (live := place / "live").mkdir()
        (place / "aside").mkdir()
        for part in self.case["noted"]:
            notes.add(live, boot_module._FAILING, failure(part))
        self.boot = here = object.__new__(boot_module._Boot)
        here.parts = [Part(name, [Region(name, "Block", [])], "found") for name in "abc"]
        here.live, here.warnings, here.found = LiveDirectory(live, ""), [], self.case["restored"]
        here.trouble = self.case["trouble"]
        here._attempt, here._attempt_cold, here._save_soon = self.attempt, self.attempt_cold, lambda: None
        here._judge_suspects = self.judge

    def attempt(self, served: object, live: object, *, goes_on: bool = False) -> str:
        self.tried.append("on" if goes_on else "first")
        serving = [region for region in self.boot.regions if not region.failed]
        breaks = [(DAMAGED, self.case["damaged"] if self.boot.found else ""), (NO, self.case["always"])]
        for cause, letters in breaks:
            for region in serving:
                if region.part in letters:
                    region.broke = True
                    return cause
        where = self.case["elsewhere"]
        return ELSEWHERE if where == "always" or (where == "restored" and self.boot.found) else ""

    def attempt_cold(self, served: object, live: object, broken_by: str, failures: frozenset[str]) -> tuple:
        if self.case["nowhere"]:
            return None, "no other place"
        self.boot.found, self.boot.live = False, LiveDirectory(self.place / "aside", "")
        for region in self.boot.regions:
            region.forget()
        cause = self.attempt(served, live)
        self.tried[-1] = "anew"
        return boot_module._Suspects(broken_by, failures, None, None), cause

    def judge(self, suspects: object, *, guilty: bool) -> None:
        self.verdict = "guilty" if guilty else "as good as any"

    def climb(self) -> Ended:
        cause = self.boot._without_what_fails(None, self.attempt(None, None))
        return Ended(cause, self.tried, notes.read(self.boot.live.path, boot_module._FAILING), self.verdict)


@pytest.mark.parametrize(
    ("case", "cause", "tried", "noted", "verdict"),
    [
        # Nothing to blame: it is left out, and noted.
        ({"always": "b", "restored": False}, "", "first on", "b", ""),
        ({"always": "ac", "restored": False}, "", "first on on", "ac", ""),
        # Something to blame: blamed once, and cleared of it, as it breaks without it too.
        ({"always": "b", "restored": True}, "", "first anew on", "b", "as good as any"),
        # A later boot knows.
        ({"always": "b", "restored": True, "noted": "b"}, "", "first on", "b", ""),
        ({"always": "ac", "restored": True, "noted": "a"}, "", "first on anew on", "ac", "as good as any"),
        # What is damaged is found guilty, whatever else breaks, and what is known is noted in the new place as well.
        ({"damaged": "b", "restored": True}, "", "first anew", "", "guilty"),
        ({"damaged": "a", "always": "b", "restored": True}, "", "first anew on", "b", "guilty"),
        ({"damaged": "b", "always": "b", "restored": True, "noted": "b"}, "", "first anew on", "b", "guilty"),
        ({"damaged": "b", "restored": True, "noted": "b"}, "", "first anew", "", "guilty"),
        # All fail: the model as a whole runs uncompiled.
        ({"always": "abc", "restored": True, "noted": "abc"}, NO, "first on on", "abc", ""),
        ({"always": "abc", "restored": False}, NO, "first on on", "abc", ""),
        # No part is guilty.
        ({"elsewhere": "always", "restored": False}, ELSEWHERE, "first", "", ""),
        ({"elsewhere": "always", "restored": True}, ELSEWHERE, "first anew", "", "as good as any"),
        ({"elsewhere": "restored", "restored": True, "noted": "abc"}, "", "first anew", "", "guilty"),
        # Of a machine whose compiler is broken, and one that could not compile without the cache, nothing is noted.
        ({"always": "b", "restored": False, "trouble": "no g++"}, "", "first on", "", ""),
        ({"damaged": "b", "restored": True, "trouble": "no g++"}, "", "first anew", "", "as good as any"),
        ({"always": "b", "restored": True, "nowhere": True}, "", "first on", "", ""),
    ],
)
def test_what_is_tried_and_noted(tmp_path: Path, case: dict, cause: str, tried: str, noted: str, verdict: str) -> None:
    ended = Ladder(tmp_path, **case).climb()
    assert ended == (cause, tried.split(), ended.noted, verdict)
    assert sorted(ended.noted) == [failure(part) for part in noted]


def test_what_is_known_before_something_else_is_blamed_is_known_in_the_new_place_too(tmp_path: Path) -> None:
    """The part comes first, and is left out; then another one breaks for what was restored."""
    ladder = Ladder(tmp_path, always="a", damaged="", noted="a", restored=True)
    attempt = ladder.attempt

    def then_another(served: object, live: object, *, goes_on: bool = False) -> str:
        if goes_on and ladder.boot.found:
            ladder.case["damaged"] = "b"
        return attempt(served, live, goes_on=goes_on)

    ladder.boot._attempt = then_another
    ended = ladder.climb()
    assert (ended.cause, ended.tried, ended.verdict) == ("", ["first", "on", "anew"], "guilty")
    assert ended.noted == [failure("a")]


def test_a_failure_is_the_same_with_other_numbers_and_paths_and_another_with_other_words() -> None:
    regions = [Region("a part\udcff", "Block", []), Region("other", "Block", [])]
    regions[0].broke = True
    one, same, other = (
        boot_module._failures(regions, cause)
        for cause in ("InductorError: /tmp/a1 at 0x7f3 is bad (3)", "InductorError: /var/b at 0x80 is bad (17)", "no")
    )
    assert one == same != other
    assert all(text.isascii() for text in one | other)
    assert boot_module._failures(regions[1:], "no") == frozenset()


def test_a_region_that_is_served_uncompiled_for_good_does_not_fail_the_check() -> None:
    here = object.__new__(boot_module._Boot)
    region = Region("a", "Block", [], differences=[0.5], tolerance=1e-4)
    here.parts = [Part("a", [region], "found")]
    assert "differs from its eager self" in here._failed_check()
    region.give_up("torch cannot trace it")
    assert here._failed_check() == ""

"""What a boot did and why, as a table for people and one line of JSON. Knows nothing of how it was done."""

from __future__ import annotations

import contextlib
import enum
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

LINE = "warmstart.report"
"""First word of the line in the setup log that holds the report as JSON."""


def say(text: str) -> None:
    """Prints at once; a log that nobody takes (a closed or broken pipe, no such letters) costs its lines, no more."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def sentence(error: Exception) -> str:
    """The first line of an error and its type; compilers add pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # "backend='inductor' raised:" says less than what follows it.
    lines = [line for line in lines if not line.endswith("raised:")] or lines
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"


class Outcome(enum.Enum):
    """How a boot ended. Every outcome serves right answers; they differ in speed."""

    WARM = "warm"
    """All compiled code came from the cache."""
    PARTIAL = "partial"
    """Some came from the cache, some was compiled."""
    COLD = "cold"
    """All was compiled."""
    EAGER = "eager"
    """Nothing is compiled; the model runs as written."""


class Stopwatch:
    """Splits the time since it was made into phases that add up to the whole.

    A phase inside a phase takes its time from the outer one, so no second is counted twice; what is in no phase is
    counted as "other". One thread at a time may use it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase = "other"
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts what runs inside to the phase; a name used twice adds up."""
        outer = self._switch(name)
        try:
            yield
        finally:
            self._switch(outer)

    def total_s(self) -> float:
        """Seconds since the stopwatch was made."""
        self._switch(self._phase)
        return sum(self.seconds.values())

    def _switch(self, name: str) -> str:
        now, before = time.perf_counter(), self._phase
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._phase, self._since = name, now
        return before


@dataclass(frozen=True)
class Evidence:
    """The counters that an outcome rests on, over the whole warm-up."""

    hits: int
    misses: int
    """FX graphs that the cache did not hold."""
    retraced: int
    """AOTAutograd entries that the cache did not hold."""
    bypasses: int
    """Graphs that torch refused to cache, which compile on every boot."""
    kernels_built: int
    restored: bool
    """Whether anything was in the live directory before the warm-up."""


def decide(evidence: Evidence) -> tuple[Outcome, str]:
    """Says from the counters how a compiled boot ended, and why in words."""
    numbers = (
        f"{evidence.hits} graphs from the cache, {evidence.misses} compiled, {evidence.kernels_built} kernels built"
    )
    if evidence.bypasses:
        numbers += f", {evidence.bypasses} that torch refuses to cache"
    if evidence.hits and not (evidence.misses or evidence.retraced or evidence.bypasses or evidence.kernels_built):
        return Outcome.WARM, numbers
    # Two requests may share a graph, so a hit alone does not mean that anything was restored.
    if evidence.hits and evidence.restored:
        return Outcome.PARTIAL, numbers
    return Outcome.COLD, numbers


@dataclass
class Report:
    """Everything a boot tells. Names end in their unit; `phases` add up to `boot_s` but for rounding."""

    outcome: Outcome
    reason: str
    boot_s: float
    phases: dict[str, float]
    """Seconds of each phase on the boot's main line, in order."""
    background: dict[str, float]
    """Seconds of what ran beside the main line."""
    counts: dict[str, int]
    """Torch's counters and the number of kernels built, from the first planned request to the last."""
    parts: list[dict[str, Any]]
    """What became of each chosen component: compiled, partly or uncompiled, and why; how its regions were found."""
    regions: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    restored: dict[str, Any]
    """What the stores gave; `inherited` is the digest of the version it was made by, if that was another."""
    persisted: list[dict[str, Any]]
    facts: dict[str, Any]
    """Device, precision, threads, key digests, places."""
    process: dict[str, Any]
    """When the model is ready: resident and highest memory in bytes, threads of Python, and child processes."""
    warnings: list[str] = field(default_factory=list)

    def json(self) -> str:
        """One line of JSON."""
        values = asdict(self) | {"outcome": self.outcome.value}
        return json.dumps(_rounded(values), sort_keys=False)

    def lines(self) -> list[str]:
        """The report for people, then the line for programs."""
        rows = [f"warmstart: {self.outcome.value} boot in {self.boot_s:.1f} s: {self.reason}"]
        rows += [f"  phases     {_phases(self.phases)}"]
        rows += [f"  cache      {self.restored['reason']}"] if self.restored else []
        rows += [f"  part       {_part(part)}" for part in self.parts]
        rows += [f"  region     {_region(region)}" for region in self.regions]
        rows += [f"  compile    {_compile(self.regions)}"] if any(region["graphs"] for region in self.regions) else []
        rows += [f"  request    {_request(request)}" for request in self.requests]
        rows += [f"  process    {_process(self.process)}"] if self.process else []
        rows += [f"  warning    {warning}" for warning in self.warnings]
        return [*rows, f"{LINE} {self.json()}"]


def _phases(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items())


def _part(part: dict[str, Any]) -> str:
    if part["reason"]:
        outcome = "PARTLY compiled" if part["outcome"] == "partly" else "UNCOMPILED"
        return f"{part['name']} is {outcome}: {part['reason']}"
    return f"{part['name']} is compiled {part['found']}"


def _region(region: dict[str, Any]) -> str:
    checked = region["difference"]
    check = "not checked" if checked is None else f"differs from eager by {checked:.1e} at most"
    speed = f"; {region['eager_s'] / region['compiled_s']:.2f}x eager's speed" if region["compiled_s"] else ""
    return (
        f"{region['name']} x{region['modules']}: {region['graphs']} graphs, {region['fx_hits']} hits,"
        f" {region['fx_misses']} misses; {check}{speed}"
    )


def _compile(regions: list[dict[str, Any]]) -> str:
    stages = dict.fromkeys(stage for region in regions for stage in region["compile_s"])
    seconds = {stage: sum(region["compile_s"].get(stage, 0.0) for region in regions) for stage in stages}
    return ", ".join(f"{stage} {value:.2f} s" for stage, value in seconds.items())


def _process(process: dict[str, Any]) -> str:
    children = f"{len(process['children'])} child processes, {process['threads']} threads"
    if process["resident_bytes"] is None:
        return children
    return f"{process['resident_bytes'] / 1e6:.0f} MB ({process['peak_bytes'] / 1e6:.0f} MB at most), {children}"


def _request(request: dict[str, Any]) -> str:
    steady = "" if request["steady_s"] is None else f", then {request['steady_s']:.3f} s"
    return f"{request['label']}: first {request['first_s']:.2f} s with {request['graphs']} graphs{steady}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        # Four significant digits at least, also of differences like 1e-7.
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value

"""Boots of a small compiled model, killed at chosen moments over one store; knows servers and stores, no command line.

A campaign is a row of chapters. Each plans four sizes that no other chapter has, so it begins cold, in one of three
kinds of place; its boots are killed one after another, and now and then one is left alone. After each kill the store
and the processes are looked at; a boot left alone must be ready, right, and find every graph that the store holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import _watchdog
import zstandard
from _server import Server, ServerError, descendants

from warmstart.bundle import SUFFIX, TEMPORARY_PREFIX
from warmstart.store import STALE_S, open_store

ROOT = Path(__file__).resolve().parent.parent
PROJECT = Path(__file__).with_name("_kill_project")
SIZES = 4  # planned by each chapter
GREY_STEPS = 2  # of 255, by which compiled pictures may differ from eager ones
GRACE_S = 3.0  # docker stop gives 10; the prediction that is to be finished takes less than one
WAIT_S = 900.0  # for anything that must come, on a machine however busy
SETTINGS = {
    # Quick to compile, and what it is given depends on the picture's size alone: each size makes a graph of its own.
    "WARMSTART_REGIONS": "AdaLayerNormContinuous",
    "WARMSTART_DYNAMIC": "false",
    "WARMSTART_RESTORE_DEADLINE_S": "600",
    "WARMSTART_PERSIST_DEADLINE_S": "600",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}

# Where compiled code lives, and what outlives a kill: nothing; the temporary directory, in which a boot begins with an
# empty directory of its own; torch's directory, set from outside as in the image, with all that was half written.
PLACES = ("fresh", "kept", "preset")
TARGETS = ("stop", "worker", "server", "container")
# Told by the trace of the boot, but for "any": a time drawn from the life of a boot, and "save": a file half in the
# store. Each is followed by a random wait of up to so many seconds.
MOMENTS = {"any": 0.5, "restore": 0.05, "compile": 4.0, "saving": 0.1, "save": 0.0, "verify": 0.2, "prediction": 0.5}
# How often each is drawn: what is unsaved is lost in a compile or a save.
WEIGHTS = {"any": 6, "restore": 1, "compile": 4, "saving": 2, "save": 3, "verify": 1, "prediction": 1}


class Violation(Exception):  # noqa: N818 - it is a finding, and not this program's error
    """The promise was broken: the message says by what."""


@dataclass
class Kill:
    """One kill: what was killed, how the moment was chosen, and what the boot was in when it came."""

    chapter: int
    place: str
    target: str
    moment: str
    phase: str = ""
    seconds: float = 0.0
    graphs: int = 0
    litter: int = 0


@dataclass
class Left:
    """A boot that was left alone: its outcome, and how many graphs the store held, it found and it compiled."""

    chapter: int
    place: str
    outcome: str
    held: int
    found: int
    compiled: int
    seconds: float


def graphs_in(files: set[tuple[str, str]]) -> set[str]:
    """Return the graphs among files: Inductor's directory has a folder for each."""
    return {"/".join(path.split("/")[:3]) for path, _ in files if path.startswith("fxgraph/")}


@dataclass
class Audit:
    """Looks through a store that processes die over, and remembers what it held."""

    store: Path
    held: dict[str, set[tuple[str, str]]] = field(default_factory=dict)  # version -> its files, path and sha256
    _read: dict[Path, tuple[os.stat_result, set[tuple[str, str]]]] = field(default_factory=dict)
    _first: dict[str, str] = field(default_factory=dict)  # graph -> the version that had it first

    def look(self) -> None:
        """Raise Violation if anything is lost, damaged, or could be taken for what it is not."""
        now: dict[str, set[tuple[str, str]]] = {}
        stored_keys = open_store(str(self.store)).keys()
        for stored in stored_keys:
            folder = self.store / stored.environment_digest / stored.version_digest
            if stored.facts is None and stored.bundles:
                raise Violation(f"{folder} has bundles, and no facts that give its name")
            files = now.setdefault(stored.version_digest, set())
            for bundle in stored.bundles:
                files |= self._files(folder / f"{bundle.name}{SUFFIX}")
        for version, files in self.held.items():
            if missing := files - now.get(version, set()):
                raise Violation(f"the store lost {len(missing)} files, {min(missing)[0]} for one")
        self.held = now
        for version, files in now.items():
            for graph in graphs_in(files):
                self._first.setdefault(graph, version)
        known = (".json", SUFFIX, ".hmac", ".covered")
        for path in self.store.rglob("*"):
            if path.is_file() and not (is_temporary(path) or path.name.endswith(known)):
                raise Violation(f"{path} is in the store, under a name that is neither a bundle's nor a temporary one")

    def _files(self, path: Path) -> set[tuple[str, str]]:
        stat = path.stat()
        known = self._read.get(path)
        if known and (known[0].st_mtime_ns, known[0].st_size) == (stat.st_mtime_ns, stat.st_size):
            return known[1]
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != path.name.removesuffix(SUFFIX):
            raise Violation(f"{path} is not what its name says")
        with zstandard.ZstdDecompressor().stream_reader(data) as tar:
            size = int(tar.read(512)[124:135], 8)
            found = {(item["path"], item["sha256"]) for item in json.loads(tar.read(size))["files"]}
        self._read[path] = stat, found
        return found

    def graphs(self, version: str) -> int:
        """Return how many graphs of its own a version's bundles hold.

        A directory that outlives its boots also has what one of them inherited, and all in it is published.
        """
        return sum(self._first.get(graph, version) == version for graph in graphs_in(self.held.get(version, set())))

    def litter(self) -> list[Path]:
        """Return the temporary files that kills left."""
        return [path for path in self.store.rglob("*") if is_temporary(path)]


def is_temporary(path: Path) -> bool:
    """Tell whether a file has the name that readers pass over."""
    return path.name.startswith(TEMPORARY_PREFIX) and path.name.endswith(".tmp")


class Place:
    """The project and where its boots live; `boots` of one chapter share what its kind says that they share."""

    def __init__(self, work: Path, number: int, kind: str, store: Path, model: Path) -> None:
        self.number = number
        self.kind = kind
        self.folder = work / f"{number}-{kind}"
        self.folder.mkdir(parents=True)
        self.trace = self.folder / "trace"
        self.sizes = list(range(2 + SIZES * number, 2 + SIZES * (number + 1)))
        self._boots = itertools.count()
        self._settings = {**SETTINGS, "WARMSTART_MODEL": str(model), "WARMSTART_CACHE_URL": str(store)}
        self.project = self.folder / "project"
        shutil.copytree(PROJECT, self.project)

    def environment(self, **more: str) -> dict[str, str | None]:
        """Return the next boot's variables; those of the caller's which would change what is compiled are removed."""
        temporary = self.folder / (f"tmp{next(self._boots)}" if self.kind == "fresh" else "tmp")
        temporary.mkdir(exist_ok=True)
        self.trace.unlink(missing_ok=True)
        removed = {name: None for name in os.environ if name.startswith(("WARMSTART_", "TORCH", "TRITON_"))}
        sizes = ",".join(map(str, self.sizes))
        own = {"WARMSTART_TEST_SIZES": sizes, "WARMSTART_TEST_TRACE": str(self.trace), "TMPDIR": str(temporary)}
        if self.kind == "preset":
            own["TORCHINDUCTOR_CACHE_DIR"] = str(temporary / "torchinductor_root")
        return {**removed, **self._settings, **own, "PYTHONPATH": str(ROOT), "HOME": str(temporary), **more}

    def lines(self) -> list[str]:
        """Return the trace of the boot that runs."""
        try:
            return self.trace.read_text().splitlines()
        except OSError:
            return []

    def clean(self) -> None:
        """Remove what a fresh place's boots left, which no later one reads: the headers alone are 150 MB."""
        if self.kind == "fresh":
            for folder in self.folder.glob("tmp*"):
                shutil.rmtree(folder)


def phase_of(lines: list[str]) -> str:
    """Return the innermost phase that had begun and not ended; planned requests are told apart by their number."""
    running: list[str] = []
    for line in lines:
        if line.startswith("+"):
            running.append(line[1:])
        elif line[1:] in running:
            running.remove(line[1:])
    phases = [name for name in running if name not in ("setup", "restoring", "saving", "request")]
    if not running:
        return "start"
    inner = phases[-1] if phases else running[-1]
    if inner == "warm-up":
        return "saving" if "saving" in running else f"compile {lines.count('+request')}"
    return "restore" if "restoring" in running and inner != "key" else inner


class Campaign:
    """Kills boots over one store.

    Args:
        work: an empty directory.
        model: the model's directory.
        seed: decides targets, moments and waits; the machine decides what the boot is in by then.
        say: told each step, a line at a time.
    """

    def __init__(self, work: Path, model: Path, seed: int, say: Callable[[str], None]) -> None:
        self.work = work
        self.model = model
        self.chance = random.Random(seed)
        self.say = say
        self.store = work / "store"
        self.audit = Audit(self.store)
        self.kills: list[Kill] = []
        self.left: list[Left] = []
        self.life_s = 20.0  # of a boot until it is ready; measured by each that is left alone
        self._right: dict[int, str] = {}  # chapter -> digest of what its compiled boots draw
        self._eager: dict[int, str] = {}  # size -> pixels of the uncompiled model

    def run(self, kills: int, per_chapter: int) -> None:
        """Make so many kills, some in each chapter's cold and some in its warm life; raise Violation if one does harm.

        Args:
            kills: in all.
            per_chapter: in each chapter; two thirds of them before a boot is first left alone.
        """
        chapters = -(-kills // per_chapter)
        self.draw_eager(chapters)
        for number in range(chapters):
            place = self.place(number, PLACES[number % len(PLACES)])
            share = min(per_chapter, kills - number * per_chapter)
            cold = -(-2 * share // 3)
            for count in (cold, share - cold):
                for _ in range(count):
                    self.kill(place)
                self.leave_alone(place)
            place.clean()
        self.litter_goes()

    def place(self, number: int, kind: str) -> Place:
        """Return where a chapter's boots live."""
        return Place(self.work, number, kind, self.store, self.model)

    def draw_eager(self, chapters: int) -> None:
        """Have the uncompiled model draw what all chapters will."""
        place = self.place(chapters, "fresh")
        place.sizes = list(range(2, 2 + SIZES * chapters))
        with self._server(place, WARMSTART_COMPILE="off") as server:
            self._eager = dict(zip(place.sizes, drawn(server), strict=True))
        place.clean()
        self.say(f"uncompiled: {len(place.sizes)} pictures to compare with")

    # --- kills --------------------------------------------------------------------------------------------------------

    def kill(self, place: Place) -> Kill:
        """Start a boot, kill it, and see what that left."""
        target = self.chance.choice(TARGETS)
        [moment] = self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))
        done = Kill(place.number, place.kind, target, moment)
        server = self._server(place)
        started = time.monotonic()
        server.start()
        try:
            namespace = until(lambda: namespace_of(server.init_pid()), "process 1 of the container", server)
            self._wait_for(moment, place, server)
            done.seconds = round(time.monotonic() - started, 2)
            done.phase = phase_of(place.lines())
            self._strike(target, server)
        finally:
            server.stop()
        if alive := [pid for pid in in_namespace(namespace) if still(pid, namespace)]:
            raise Violation(f"{len(alive)} processes outlived their container, {alive[0]} for one")
        self.kills.append(done)
        self._look(done, place)
        return done

    def _strike(self, target: str, server: Server) -> None:
        if target == "stop":
            return server.stop()
        if target == "worker":
            pid = until(server.worker_pid, "the worker", server)
        else:
            init = until(server.init_pid, "process 1 of the container", server)
            below = until(lambda: descendants(init), "the server", server)
            # The end of unshare, which is outside, ends the container as that of its process 1 does.
            outside = set(server.family()) - {init, *below}
            pid = below[0] if target == "server" else self.chance.choice([init, *outside])
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.kill(pid, signal.SIGKILL)
        if target != "worker":
            server.wait_ended(WAIT_S)
        return None

    def _wait_for(self, moment: str, place: Place, server: Server) -> None:
        """Return at the moment, or when the boot is past it, as nothing is left to compile or to save."""
        chance, before = self.chance, set(self.audit.litter())
        nth = chance.randint(1, SIZES)
        passed: Callable[[list[str]], bool] = {
            "restore": lambda lines: "+restoring" in lines,
            "compile": lambda lines: lines.count("+request") >= nth,
            "saving": lambda lines: lines.count("+saving") >= nth or "+verify" in lines,
            "save": lambda lines: "+verify" in lines or bool(set(self.audit.litter()) - before),
            "verify": lambda lines: "+verify" in lines,
            "prediction": lambda lines: "+ready" in lines,
        }.get(moment, lambda _: True)
        pause_s = MOMENTS[moment] * chance.random()
        if moment == "any":
            ends = time.monotonic() + chance.uniform(0, 1.1 * self.life_s)
            # A warm boot is over before a cold one's time; one that only waits for requests has little to lose.
            until(lambda: time.monotonic() > ends or "+ready" in place.lines(), "the time drawn", server)
        poll_s = 0.0 if moment == "save" else 0.02
        until(lambda: passed(place.lines()), f"the moment {moment!r}", server, poll_s)
        if moment == "prediction":
            server.wait_ready()
            server.post("/predictions", {"input": {"repeat": 20}}, headers={"Prefer": "respond-async"})
            until(lambda: "+prediction" in place.lines(), "a prediction", server)
        time.sleep(pause_s)

    def _look(self, done: Kill, place: Place) -> None:
        self.audit.look()
        done.graphs = self.audit.graphs(version_of(place))
        done.litter = len(self.audit.litter())
        if done.litter > len(self.kills):
            raise Violation(
                f"{len(self.kills)} kills left {done.litter} temporary files in the store, more than one each"
            )
        self.say(
            f"kill {len(self.kills)}: {done.target} ({done.moment}) in {done.phase!r} after {done.seconds:.1f} s, place"
            f" {place.number} {place.kind}; the store holds {done.graphs} graphs of it, {done.litter} temporary files"
        )

    # --- boots that are left alone ------------------------------------------------------------------------------------

    def leave_alone(self, place: Place) -> Left:
        """Boot without a kill: it must be ready and right, and find all graphs that the store holds."""
        held = self.audit.graphs(version_of(place))
        started = time.monotonic()
        try:
            with self._server(place) as server:
                self.life_s = time.monotonic() - started
                report, pictures = server.setup_report(), drawn(server)
        except ServerError as error:
            raise Violation(f"a boot that was left alone was not ready: {error}") from None
        self.judge(place, report, pictures, held)
        return self.left[-1]

    def judge(self, place: Place, report: dict, pictures: list[str], held: int) -> None:
        """Raise Violation unless a boot is right, compiled, and found as many graphs as were held; then look again."""
        counts = report["counts"]
        found, compiled = counts["fx_hits"], counts["fx_misses"]
        left = Left(place.number, place.kind, report["outcome"], held, found, compiled, report["boot_s"])
        self.left.append(left)
        self.say(f"left alone: {left.outcome}, {held} graphs held, {found} found, {compiled} compiled")
        reason = report["reason"]
        if left.outcome == "eager":
            raise Violation(f"a boot after kills is eager: {reason}")
        if found < held:
            raise Violation(f"the store held {held} graphs, and the boot found {found}: {reason}")
        if held == SIZES and left.outcome != "warm":
            raise Violation(f"the store held every graph, and the boot was {left.outcome}: {reason}")
        for size, picture in zip(place.sizes, pictures, strict=True):
            if (steps := differ(picture, self._eager[size])) > GREY_STEPS:
                raise Violation(f"the picture of {size} tokens differs from the uncompiled one by {steps} grey steps")
        digest = hashlib.sha256("".join(pictures).encode()).hexdigest()
        if self._right.setdefault(place.number, digest) != digest:
            raise Violation(f"the pictures of place {place.number} are not those of its first compiled boot")
        self.audit.look()
        version = report["facts"]["version"]
        (place.folder / "version").write_text(version)
        if (graphs := self.audit.graphs(version)) != SIZES:
            raise Violation(f"a boot that compiled all left {graphs} of {SIZES} graphs in the store")

    def litter_goes(self) -> None:
        """See that temporary files of kills go with the next save of their version, once they are an hour old."""
        litter = self.audit.litter()
        for path in litter:
            os.utime(path, (time.time() - 2 * STALE_S,) * 2)
        store = open_store(str(self.store))
        stored_keys = store.keys()
        for stored in stored_keys:
            if stored.facts is not None and stored.bundles:
                name = stored.bundles[0].name
                folder = self.store / stored.environment_digest / stored.version_digest
                store.publish(stored.facts, folder / f"{name}{SUFFIX}", name)
        if left := self.audit.litter():
            raise Violation(f"{left[0]} is two hours old, and a save did not remove it")
        self.audit.look()
        self.say(f"{len(litter)} temporary files went with the next save")

    def _server(self, place: Place, **more: str) -> Server:
        return Server(
            place.project,
            environment=place.environment(**more),
            namespace=True,
            setup_timeout_s=WAIT_S,
            stop_timeout_s=GRACE_S,
        )


# --- Processes of one image beside each other ------------------------------------------------------------------------

ALONE = """\
import json, predict
predictor = predict.Predictor()
predictor.setup()
drawn = predictor.run(repeat=1)
print()
print(json.dumps([json.loads(predictor.model.report.json()), drawn]))
"""


@dataclass
class Neighbour:
    """A boot without a server, beside others; killed at a time, or left alone where that is None."""

    process: subprocess.Popen[str]
    log: Path
    started: float  # by the monotonic clock, as the next
    kill_at: float | None
    all_of_it: bool  # else the compilers that it started live on


def beside(campaign: Campaign, place: Place, count: int, at_once: int) -> None:
    """Start, kill and leave alone boots that share live directory and store; then one alone, which must be warm."""
    chance = campaign.chance
    started: list[Neighbour] = []
    running: list[Neighbour] = []
    try:
        while len(started) < count or running:
            while len(started) < count and len(running) < at_once:
                # The last one is left alone, so that there is something to be warm by.
                killed = len(started) < count - 1 and chance.random() < 0.6
                running.append(start_neighbour(place, chance, len(started), campaign.life_s, killed))
                started.append(running[-1])
            running = [item for item in running if not ended(campaign, place, item)]
            time.sleep(0.05)
    finally:
        for item in started:
            kill_group(item)
            item.process.wait()
    campaign.audit.look()
    campaign.leave_alone(place)
    if campaign.left[-1].outcome != "warm":
        raise Violation(f"a lone boot after {count} beside each other was {campaign.left[-1].outcome}")


def start_neighbour(place: Place, chance: random.Random, number: int, life_s: float, killed: bool) -> Neighbour:
    """Start one boot in a session of its own."""
    variables = place.environment(WARMSTART_TEST_TRACE=str(place.folder / f"trace{number}"))
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    log = place.folder / f"log{number}"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", ALONE],
            cwd=place.project,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    started = time.monotonic()
    return Neighbour(
        process, log, started, started + chance.uniform(0, life_s) if killed else None, chance.random() < 0.5
    )


def ended(campaign: Campaign, place: Place, item: Neighbour) -> bool:
    """Kill a boot whose time has come, and judge one that ended by itself; tell whether it is over."""
    if item.process.poll() is None:
        if item.kill_at is None or time.monotonic() < item.kill_at:
            return False
        if item.all_of_it:
            kill_group(item)
        item.process.kill()
        item.process.wait()
        campaign.audit.look()
        name = f"trace{item.log.name.removeprefix('log')}"
        phase = phase_of((place.folder / name).read_text().splitlines()) if (place.folder / name).exists() else "start"
        campaign.kills.append(Kill(place.number, "shared", "group" if item.all_of_it else "process", "any", phase))
        campaign.say(f"beside: killed in {phase!r}")
        return True
    lines = item.log.read_text().splitlines()
    if item.process.returncode:
        raise Violation(f"a boot beside others failed: {' / '.join(lines[-5:])}")
    # So that the next ones are killed within their lives, however fast the machine is.
    campaign.life_s = time.monotonic() - item.started
    report, pictures = json.loads(lines[-1])
    campaign.judge(place, report, pictures, 0)
    return True


def kill_group(item: Neighbour) -> None:
    """Kill a boot and what it started, unless its number is somebody else's by now."""
    if item.process.returncode is None or item.process.pid not in _watchdog.members(item.process.pid):
        _watchdog.kill(item.process.pid)


# --- Parts -----------------------------------------------------------------------------------------------------------


def until(asked: Callable[[], object], what: str, server: Server, poll_s: float = 0.02):
    """Return the first true answer; raise Violation if the server ends or fails before it, or it never comes."""
    started = asked_server = time.monotonic()
    while not (answer := asked()):
        now = time.monotonic()
        if now - asked_server > 2:
            asked_server = now
            try:
                server.is_ready()
            except ServerError as error:
                raise Violation(f"the boot failed by itself, before {what}: {error}") from None
        if now - started > WAIT_S:
            raise Violation(f"{what} had not come after {WAIT_S:.0f} s")
        time.sleep(poll_s)
    return answer


def drawn(server: Server) -> list[str]:
    """Return the pixels of all planned pictures, in hexadecimal."""
    answer = server.predict({})
    if answer.status != 200 or answer.body["status"] != "succeeded":
        raise Violation(f"a boot that was ready did not draw: {answer}")
    return list(answer.body["output"])


def differ(one: str, other: str) -> int:
    """Return by how many grey steps two pictures differ at most."""
    pairs = zip(bytes.fromhex(one), bytes.fromhex(other), strict=True)
    return max(abs(left - right) for left, right in pairs)


def version_of(place: Place) -> str:
    """Return the digest of a place's version, from the trace of its boots, or "" before one came so far."""
    found = [line[1:] for line in place.lines() if line.startswith("=")]
    if found:
        (place.folder / "version").write_text(found[0])
    known = place.folder / "version"
    return known.read_text() if known.exists() else ""


def namespace_of(pid: int | None) -> str:
    """Return the PID namespace of a process, "" if it is gone or still that of this one."""
    with contextlib.suppress(OSError):
        found = os.readlink(f"/proc/{pid}/ns/pid")  # noqa: PTH115 - no path, a name
        return "" if found == os.readlink("/proc/self/ns/pid") else found  # noqa: PTH115
    return ""


def in_namespace(name: str) -> list[int]:
    """Return the processes of a PID namespace."""
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in pids if namespace_of(pid) == name]


def still(pid: int, namespace: str) -> bool:
    """Tell whether a process that is being ended by the kernel is still there after some seconds."""
    ends = time.monotonic() + 10
    while namespace_of(pid) == namespace:
        if time.monotonic() > ends:
            return True
        time.sleep(0.05)
    return False


# --- Figures ---------------------------------------------------------------------------------------------------------


def table(campaign: Campaign) -> Iterator[str]:
    """Yield what was done as lines for people."""
    kills = campaign.kills
    phases = sorted({item.phase.split()[0] for item in kills})
    targets = sorted({item.target for item in kills})
    yield f"{len(kills)} kills, by what the boot was in and what was killed:"
    yield "  " + f"{'':<14}" + "".join(f"{target:>11}" for target in [*targets, "all"])
    counted = Counter((item.phase.split()[0], item.target) for item in kills)
    for phase in phases:
        row = [counted[phase, target] for target in targets]
        yield "  " + f"{phase:<14}" + "".join(f"{number:>11}" for number in [*row, sum(row)])
    yield f"most temporary files at once: {max((item.litter for item in kills), default=0)}"
    outcomes = Counter(item.outcome for item in campaign.left)
    told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    yield f"{len(campaign.left)} boots left alone: {told}; in their order, graphs held by the store / found / compiled:"
    rows = [f"{item.place} {item.held}/{item.found}/{item.compiled}" for item in campaign.left]
    yield from ("  " + ", ".join(rows[start : start + 6]) for start in range(0, len(rows), 6))

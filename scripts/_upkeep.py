"""The commands of scripts/cache that change stores: what they print and their exit status; not how it is done."""

import argparse
import datetime
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from warmstart import compaction, upkeep
from warmstart.bundle import BundleError, Limits
from warmstart.cache import size
from warmstart.compaction import Compacted, CompactOutcome
from warmstart.key import Key
from warmstart.store import Store, StoredKey, StoreError
from warmstart.upkeep import Rules, Version

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]?)(i?)B?")


def number(text: str) -> float:
    """Parse a number that is not negative."""
    value = float(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def whole_number(text: str) -> int:
    """Parse a whole number that is not negative."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return value


def size_bytes(text: str) -> int:
    """Parse a size: 1500, 500MB, 2 GB, 1.5GiB."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500MB or 2GiB")
    value, prefix, binary = found.groups()
    return int(float(value) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def compact(stores: Sequence[Store], limits: Limits, *, as_json: bool) -> int:
    """Pack each version's bundles into one, and sign with the first secret what only the second signed."""
    rows = [
        {"location": store.location, "keys": [_compact_one(store, item, limits) for item in held if item.bundles]}
        for store in stores
        if (held := store.keys()) is not None
    ]
    done = [row for store in rows for row in store["keys"]]
    if as_json:
        _print_json({"stores": rows})
    else:
        covered, removed = (sum(row[what] for row in done) for what in ("covered", "removed"))
        print(f"{covered} bundles were packed into others, {removed} were removed.")
    return 1 if any(row["outcome"] == CompactOutcome.FAILED.value for row in done) else 0


def _compact_one(store: Store, stored: StoredKey, limits: Limits) -> dict[str, Any]:
    done = _try_compact(store, stored.facts, limits)
    signed = upkeep.sign_anew(store, stored.facts) if stored.facts else 0
    again = f"; {signed} were signed anew" if signed else ""
    _say(f"{store.location} {heading(stored)}: {done.reason}{again}")
    return _names(stored) | {
        "outcome": done.outcome.value,
        "reason": done.reason,
        "name": done.name,
        "covered": done.covered,
        "removed": done.removed,
        "signed": signed,
    }


def _try_compact(store: Store, key: Key | None, limits: Limits) -> Compacted:
    if key is None:
        reason = f"left alone, since {upkeep.NO_FACTS}"
        return Compacted(CompactOutcome.FAILED, reason)
    try:
        return compaction.compact(store, key, Path(tempfile.gettempdir()), limits)
    except (OSError, StoreError, BundleError) as error:
        return Compacted(CompactOutcome.FAILED, str(error))


def prune(stores: Sequence[Store], rules: Rules, spare: Key | None, *, dry_run: bool, as_json: bool) -> int:
    """Remove the versions that the rules name, oldest first, and say which and how much that is."""
    rows = []
    for store in stores:
        found = upkeep.versions(store)
        chosen = upkeep.outdated(found, rules, spare=spare)
        for item in chosen:
            _say(f"{store.location} {heading(item.stored)}: {'would go' if dry_run else 'goes'}, {_told(item)}")
            if not dry_run:
                upkeep.remove(store, item)
        bad = _prune_broken(store, [item for item in found if item not in chosen], dry_run)
        rows.append({"location": store.location, "versions": len(found), "removed": [_version_row(i) for i in chosen]})
        rows[-1]["broken"] = bad
        total_bytes = sum(item.size_bytes for item in chosen)
        if not as_json:
            verb = "would go" if dry_run else "went"
            print(f"{store.location}: {len(chosen)} of {len(found)} versions {verb}, {size(total_bytes)}.")
    if as_json:
        _print_json({"dry_run": dry_run, "stores": rows})
    return 0


def _prune_broken(store: Store, found: Sequence[Version], dry_run: bool) -> list[str]:
    """Remove bundles that no boot uses, as one noted that they are broken; whatever version they are of."""
    names = []
    for item in found:
        for bundle in upkeep.broken(item):
            verb = "would go" if dry_run else "goes"
            _say(f"{store.location} {heading(item.stored)} bundle {bundle.name[:12]}: {verb}, it is noted as broken")
            names.append(bundle.name)
        if not dry_run:
            upkeep.remove_broken(store, item)
    return names


def copy(source: Store, target: Store, *, as_json: bool) -> int:
    """Copy what the target lacks, and say what was left behind."""
    if not any(stored.bundles for stored in source.keys()):  # noqa: SIM118  a store is no mapping
        _say(f"{source.location} holds no bundles, so nothing was copied. Is the location right?")
        return 1
    done = upkeep.copy(source, target, _say)
    for line in done.skipped:
        _say(f"left behind: {line}")
    if as_json:
        copied = [{"name": item.name, "bytes": item.size_bytes} for item in done.done]
        _print_json({"from": source.location, "to": target.location, "copied": copied, "skipped": done.skipped})
    else:
        total_bytes = sum(item.size_bytes for item in done.done)
        left = f"; {len(done.skipped)} were left behind" if done.skipped else ""
        print(f"{len(done.done)} bundles ({size(total_bytes)}) from {source.location} to {target.location}{left}.")
    return 1 if done.skipped else 0


def heading(stored: StoredKey) -> str:
    """Return the two digests as people write them."""
    return f"{stored.environment_digest[:12]}/{stored.version_digest[:12]}"


def _told(item: Version) -> str:
    return f"{size(item.size_bytes)}, last published {_date(item)}"


def _date(item: Version) -> str:
    return datetime.datetime.fromtimestamp(item.published_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _version_row(item: Version) -> dict[str, Any]:
    return _names(item.stored) | {
        "bundles": len(item.stored.bundles),
        "bytes": item.size_bytes,
        "published": _date(item),
    }


def _names(stored: StoredKey) -> dict[str, Any]:
    return {"environment": stored.environment_digest, "version": stored.version_digest}


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""Chooses the version that one without bundles of its own starts from; knows keys and stores, not what bundles hold.

Using another version's compiled code is safe: Inductor's own key decides for each graph whether it may be used.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmstart.key import Key, differ_in_compiler, difference, lacks_compiler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from warmstart.store import Store, StoredKey


@dataclass(frozen=True)
class Sibling:
    """A stored version of the same environment."""

    key: Key
    distance: int
    """How many facts of the version differ."""
    published_s: float
    """When its latest bundle was, by the store's clock."""
    difference: str
    """Which facts differ, in words."""

    def __str__(self) -> str:
        return f"version {self.key.version_digest[:8]} ({self.difference})"


def of_this_environment(here: Key, there: Key) -> bool:
    """Whether a stored key is another version of the same environment."""
    return there.environment_digest == here.environment_digest and there.version_digest != here.version_digest


def but_for_the_compiler(here: Key, there: Key) -> bool:
    """Whether a stored key's environment stands in for ours, which lacks nothing but a compiler."""
    return lacks_compiler(here.environment) and differ_in_compiler(here.environment, there.environment)


def standing_in(here: Key, stores: Sequence[Store], deadline: float) -> Key:
    """Our version in the stored environment that stands in for ours, which has no compiler; ours if there is none.

    Of several, the one with the nearest version. Nothing more is trusted than where the compiler is there: bundles of
    that key are verified as any others.
    """
    found, _ = find(here, stores, deadline, but_for_the_compiler) if lacks_compiler(here.environment) else (None, ())
    return Key(found.key.environment, here.version) if found else here


def nearest(
    here: Key, store: Store, stored: Iterable[StoredKey], fits: Callable[[Key, Key], bool] = of_this_environment
) -> list[Sibling]:
    """The keys that fit ours, with bundles in a store, whose versions have the fewest differing facts.

    Raises:
        OSError, StoreError: the store cannot be read.
    """
    found = [
        (_distance(here, item.facts), item, item.facts)
        for item in stored
        if item.facts is not None and item.bundles and fits(here, item.facts)
    ]
    least = min((distance for distance, _, _ in found), default=0)
    return [
        Sibling(facts, distance, _published_s(store, item), difference(here.version, facts.version))
        for distance, item, facts in found
        if distance == least
    ]


def best(found: Iterable[Sibling]) -> Sibling | None:
    """The one with the fewest differing facts; of equal ones the latest."""
    ranked = sorted(found, key=lambda item: (item.distance, -item.published_s, item.key.version_digest))
    return ranked[0] if ranked else None


def find(
    here: Key, stores: Sequence[Store], deadline: float, fits: Callable[[Key, Key], bool] = of_this_environment
) -> tuple[Sibling | None, tuple[str, ...]]:
    """Asks all stores at once until the deadline, by `time.monotonic()`; also says which did not answer, and why."""
    answers: queue.SimpleQueue[list[Sibling] | str] = queue.SimpleQueue()
    for store in stores:
        _ask(here, store, answers, fits)
    found: list[Sibling] = []
    failed: list[str] = []
    for number in range(len(stores)):
        try:
            answer = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            failed.append(f"{len(stores) - number} of {len(stores)} stores did not list their versions in time")
            break
        if isinstance(answer, str):
            failed.append(answer)
        else:
            found += answer
    return best(found), tuple(failed)


def _ask(
    here: Key, store: Store, answers: queue.SimpleQueue[list[Sibling] | str], fits: Callable[[Key, Key], bool]
) -> None:
    def work() -> None:
        answer: list[Sibling] | str
        try:
            # Another version is in this environment, and only what stands in for it is in another.
            answer = nearest(
                here, store, store.keys(here.environment_digest if fits is of_this_environment else None), fits
            )
        # The boundary: whatever a store does here, a panic of its client included, costs an inheritance, not a boot.
        except BaseException as error:  # noqa: BLE001
            answer = f"{store.location} did not list its versions ({type(error).__name__}: {str(error).rstrip('.')})"
        answers.put(answer)

    try:
        # A daemon: a thread that hangs in a store must not keep the process from ending.
        threading.Thread(target=work, name="warmstart-siblings", daemon=True).start()
    except RuntimeError as error:  # the container's limit of threads
        answers.put(f"{store.location} was not asked for its versions: {error}")


def _published_s(store: Store, item: StoredKey) -> float:
    # None is left if a compaction or a prune was at work since the listing.
    return max((file.modified_s for file in store.files(item)), default=0.0)


def _distance(here: Key, other: Key) -> int:
    labels = {*here.version, *other.version}
    return sum(here.version.get(label) != other.version.get(label) for label in labels)

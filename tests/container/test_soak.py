"""Hundreds of predictions on one server, warmed and unwarmed kinds in turn, grow nothing; what grows would be seen."""

from pathlib import Path

import pytest

PREDICTIONS = 400


@pytest.fixture(scope="module")
def soak(command):
    return command("soak")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_four_hundred_predictions_grow_nothing(soak, tmp_path: Path) -> None:
    found = soak.soak(tmp_path, PREDICTIONS, seed=1)
    assert found["violations"] == [], found
    assert (found["predictions"], found["graphs_compiled"]) == (PREDICTIONS * found["looks"], 0)
    # Warmed kinds and others took turns.
    assert found["predictions"] / 4 < found["uncompiled"] < found["predictions"]


def samples(soak, resident_bytes, files=(7, 7, 7, 7)):
    pairs = zip(resident_bytes, files, strict=True)
    return [soak.Sample(number, size, count, 0) for number, (size, count) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("resident_bytes", "files", "graphs", "words"),
    [
        ((100, 100, 100, 100), (7, 7, 7, 7), 0, []),
        ((100, 90_000, 100, 100), (7, 9, 7, 7), 0, []),
        ((100, 5_100, 10_100, 15_100), (7, 7, 7, 7), 0, ["resident memory grew by 5000 bytes a prediction"]),
        ((100, 100, 100, 100), (7, 7, 8, 9), 0, ["there are 9 files, after 7"]),
        ((100, 100, 100, 100), (7, 7, 7, 7), 2, ["2 graphs were compiled by predictions"]),
    ],
    ids=["flat", "one jump", "memory", "files", "graphs"],
)
def test_what_grows_is_seen(soak, resident_bytes, files, graphs, words) -> None:
    seen = samples(soak, resident_bytes, files)
    slope_bytes = soak.slope([(item.predictions, item.resident_bytes) for item in seen])
    found = soak.grown(seen, graphs, slope_bytes)
    assert [sentence.startswith(word) for sentence, word in zip(found, words, strict=True)] == [True] * len(words)


class Nothing:
    """In place of a server, where what is asked of it is made up."""

    def __init__(self, *_, **__) -> None: ...

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...

    def setup_report(self):
        return {"reason": "made up"}


@pytest.mark.parametrize(("grows_for", "looks", "violations"), [(0, 1, 0), (1, 2, 0), (2, 3, 0), (3, 3, 1)])
def test_memory_that_settles_is_not_lost_and_memory_that_goes_on_growing_is(
    soak, monkeypatch, tmp_path, grows_for, looks, violations
) -> None:
    def watch(server, place, asked, seen) -> None:
        step = 50_000 if len(seen.samples) < grows_for * soak.SAMPLES else 0
        for _ in range(soak.SAMPLES):
            seen.predictions += 10
            resident = (seen.samples[-1].resident_bytes if seen.samples else 0) + step
            seen.samples.append(soak.Sample(seen.predictions, resident, 7, 0))

    monkeypatch.setattr(soak, "Server", Nothing)
    monkeypatch.setattr(soak, "watch", watch)
    found = soak.soak(tmp_path, 400, seed=1)
    assert (found["looks"], len(found["violations"])) == (looks, violations), found


def test_the_same_seed_asks_for_the_same_pictures(soak) -> None:
    first = soak.requests(50, 3)
    assert first == soak.requests(50, 3) != soak.requests(50, 4)
    assert {inputs["aspect_ratio"] for inputs in first} == set(soak.SHAPES)

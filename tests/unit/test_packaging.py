"""The image gets what it needs, nothing that it does not, and no gigabytes.

.dockerignore is read here by Docker's rules, which are not those of .gitignore: a pattern without a slash matches
at the root only, `**` spans directories, a pattern that matches a directory takes all below it, and of several
matching patterns the last decides.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from project_tree import ROOT, project_files

# What may be at the top level of the image. A new name here is a decision: does the container read it?
IMAGE_NAMES = {
    "LICENSE", "cache", "cog-text.yaml", "cog.yaml", "predict.py", "predict_text.py", "requirements-local.txt",
    "requirements.txt", "scripts", "warmstart", "weights", "weights-text",
}  # fmt: skip
MAX_CODE_BYTES = 2_000_000  # everything but weights/ and cache/; it is about a quarter of that
MAX_WEIGHTS_BYTES = {"weights": 16_000_000, "weights-text": 5_000_000}


def pattern_regex(pattern: str) -> re.Pattern[str]:
    """Translate one Docker pattern to a regular expression for a whole path."""
    out, rest = "", pattern.strip("/")
    while rest:
        if rest.startswith("**"):
            rest = rest[2:]
            inner = rest.startswith("/")
            rest = rest.removeprefix("/")
            # `**/x` matches x at any depth, the root included; a trailing `**` matches whatever is left.
            out += "(?:.*/)?" if inner else ".*"
        elif rest.startswith("["):
            end = rest.index("]")
            out, rest = out + rest[: end + 1], rest[end + 1 :]
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(rest[0], re.escape(rest[0]))
            rest = rest[1:]
    return re.compile(out)


class Ignore:
    """Which paths a .dockerignore keeps from the builder."""

    def __init__(self, text: str) -> None:
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        self.rules = [(pattern_regex(line.removeprefix("!")), not line.startswith("!")) for line in lines]

    def excludes(self, path: str) -> bool:
        parts = path.split("/")
        prefixes = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        verdict = False
        for regex, excluded in self.rules:
            if any(regex.fullmatch(prefix) for prefix in prefixes):
                verdict = excluded
        return verdict

    def sent(self, root: Path) -> Iterator[str]:
        """Yield every file below `root` that goes to the builder, without entering excluded directories."""
        keeps_inside = any(not excluded for _, excluded in self.rules)
        for directory, names, files in os.walk(root):
            here = Path(directory).relative_to(root)
            if not keeps_inside:
                names[:] = [name for name in names if not self.excludes((here / name).as_posix())]
            for name in files:
                if not self.excludes((here / name).as_posix()):
                    yield (here / name).as_posix()


@pytest.fixture(scope="module")
def ignore() -> Ignore:
    return Ignore((ROOT / ".dockerignore").read_text())


@pytest.mark.parametrize(
    ("pattern", "matches", "misses"),
    [
        ("docs", ["docs", "docs/a.md", "docs/b/c"], ["warmstart/docs", "docs2"]),
        ("*.md", ["README.md"], ["weights/README.md"]),
        ("**/*.md", ["README.md", "weights/README.md", "a/b/c.md"], ["README.mdx"]),
        ("**/__pycache__", ["__pycache__/a", "a/b/__pycache__/c.pyc"], ["a/pycache"]),
        ("cache/**/.*", ["cache/.x", "cache/a/b/.tmp"], ["cache/a/b.zst", "a/cache/.x"]),
        ("**/*.py[cod]", ["a.pyc", "a/b.pyo"], ["a.py", "a.pyx"]),
        ("/build/", ["build/a"], ["a/build"]),
        ("a?c", ["abc"], ["a/c", "abbc"]),
        ("a/**", ["a/b", "a/b/c"], ["b/a"]),
    ],
)
def test_patterns_mean_what_docker_means(pattern: str, matches: list[str], misses: list[str]) -> None:
    ignore = Ignore(pattern)
    assert [path for path in matches if not ignore.excludes(path)] == []
    assert [path for path in misses if ignore.excludes(path)] == []


def test_the_last_matching_pattern_decides() -> None:
    ignore = Ignore("cache\n!cache/README.md\n# not a pattern\n")
    assert ignore.excludes("cache/a")
    assert not ignore.excludes("cache/README.md")
    assert Ignore("!a\na").excludes("a")


@pytest.mark.parametrize(
    "path",
    [
        "predict.py",
        "cog.yaml",
        "requirements.txt",
        "warmstart/__init__.py",
        "warmstart/models/diffusers.py",
        "weights/model_index.json",
        "weights-text/model.safetensors",
        "weights/transformer/diffusion_pytorch_model.safetensors",
        "weights/tokenizer/special_tokens_map.json",
        "weights/.fetched.json",
        "cache/0123abcd/environment.json",
        "cache/0123abcd/4567ef/version.json",
        "cache/0123abcd/4567ef/89ab.tar.zst",
        ".cog/openapi_schema.json",
        ".cog/tmp/build1/requirements.txt",
    ],
)
def test_needed_files_go_in(ignore: Ignore, path: str) -> None:
    assert not ignore.excludes(path)


@pytest.mark.parametrize(
    "path",
    [
        ".git/objects/pack/pack-1.pack",
        ".github/workflows/test.yaml",
        ".ci/run",
        ".venv/lib/python3.11/site-packages/torch/lib/libtorch.so",
        "examples/.venv/bin/python",
        ".env",
        ".env.production",
        "tests/unit/test_key.py",
        "docs/benchmarks/phases.png",
        "README.md",
        "requirements-dev.txt",
        "seven.png",
        "output.0.webp",
        "warmstart/__pycache__/key.cpython-311.pyc",
        ".mypy_cache/3.11/cache.db",
        ".pytest_cache/v/cache/lastfailed",
        ".ruff_cache/0.17.6/1",
        "warmstart.egg-info/PKG-INFO",
        "cache/0123abcd/.89ab.tmp",
        ".weights.fetching/model/vae/model.safetensors.0123abcd.part",
        "boot.log",
    ],
)
def test_junk_stays_out(ignore: Ignore, path: str) -> None:
    assert ignore.excludes(path)


def test_each_thing_that_goes_in_is_known(ignore: Ignore) -> None:
    sent = {path.split("/")[0] for path in project_files() if not ignore.excludes(path)}
    assert sent <= IMAGE_NAMES


def test_every_name_in_the_image_exists() -> None:
    assert {name for name in IMAGE_NAMES if not (ROOT / name).exists()} == set()


def test_the_working_tree_sends_no_gigabytes(ignore: Ignore) -> None:
    """Junk that git ignores and .dockerignore forgot would be found here, on the machine that has it."""
    sizes = {
        path: (ROOT / path).lstat().st_size
        for path in ignore.sent(ROOT)
        if path.split("/")[0] not in {*MAX_WEIGHTS_BYTES, "cache", ".cog"}
    }
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    assert sum(sizes.values()) < MAX_CODE_BYTES, largest


@pytest.mark.parametrize("weights", MAX_WEIGHTS_BYTES)
def test_the_default_weights_are_small(weights: str) -> None:
    tracked = [ROOT / path for path in project_files() if path.startswith(f"{weights}/")]
    assert 0 < sum(path.stat().st_size for path in tracked) < MAX_WEIGHTS_BYTES[weights]


def test_weights_are_as_readable_as_the_code() -> None:
    """safetensors writes files for their owner only, and a container need not run as that user."""
    code = (ROOT / "predict.py").stat().st_mode
    weights = [ROOT / path for path in project_files() if path.split("/")[0] in MAX_WEIGHTS_BYTES]
    assert [path for path in weights if code & ~path.stat().st_mode & 0o444] == []


def test_git_keeps_what_the_image_needs() -> None:
    """A pattern in .gitignore must not drop a needed file from a clone."""
    files = set(project_files())
    predictors = {"predict.py", "cog.yaml", "predict_text.py", "cog-text.yaml"}
    assert predictors | {"requirements.txt", "cache/README.md", "warmstart/key.py"} <= files

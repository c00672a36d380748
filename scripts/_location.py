"""Reads the location of a store from a command line; knows argparse and paths, no store."""

import argparse
from pathlib import Path


def location(text: str) -> str:
    """Return a URL as it is, and a directory as an absolute path: scripts change to the project's directory.

    Raises:
        argparse.ArgumentTypeError: it is empty, as an unset variable would make it, or names an unknown home.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("the location is empty; name a directory or a URL such as s3://bucket/prefix")
    if "://" in text:
        return text
    try:
        return str(Path(text).expanduser().absolute())
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be resolved: {error} Name the directory in full.") from error

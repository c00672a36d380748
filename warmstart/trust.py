"""Whom to believe: secrets that sign, and who may write to a directory; not what is signed, nor what lies there."""

from __future__ import annotations

import grp
import hashlib
import hmac
import os
import pwd
import shlex
import stat
from pathlib import Path

MIN_SECRET_CHARACTERS = 16
MAX_SECRETS = 2

_NOBODY = 65534  # what a user namespace shows for every owner that it does not know


class Secrets:
    """At most two secrets: the first signs, either is accepted. Nothing that prints this shows them.

    Args:
        values: the secrets themselves; none is no secret.

    Raises:
        ValueError: a secret is short, or there are more than two; the text does not quote them.
    """

    __slots__ = ("_values",)

    def __init__(self, *values: str) -> None:
        if len(values) > MAX_SECRETS:
            raise ValueError(f"{len(values)} secrets, where {MAX_SECRETS} are allowed: the new one and the old one")
        if short := [len(value) for value in values if len(value) < MIN_SECRET_CHARACTERS]:
            raise ValueError(f"a secret of {short[0]} characters, where {MIN_SECRET_CHARACTERS} are the least")
        self._values = tuple(os.fsencode(value) for value in values)  # as the environment held them

    def __bool__(self) -> bool:
        return bool(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secrets) and self._values == other._values

    def __hash__(self) -> int:
        return hash(self._values)

    def __repr__(self) -> str:
        return f"Secrets(<{len(self._values)} hidden>)"

    def sign(self, *parts: str) -> str:
        """HMAC-SHA256 hex, by the first secret, over parts without line breaks."""
        return _sign(self._values[0], parts)

    def accepts(self, signature: str, *parts: str) -> bool:
        """Whether one of the secrets made the signature; takes as long whichever did."""
        # Every secret is tried, so that the time does not tell which one fits.
        return sum(_same(signature, _sign(value, parts)) for value in self._values) > 0

    def is_by_first(self, signature: str, *parts: str) -> bool:
        """Whether the secret that signs now made the signature."""
        return _same(signature, self.sign(*parts))


def distrust(folder: Path, *, signed: bool, follow: bool = False) -> str:
    """Says why others may have put code into a directory, "" if none but root, its user and this process could.

    Args:
        folder: the directory; one that is not there is nobody's.
        signed: signatures tell whose code is in there, so its owner and group need not. What everybody can write is
            distrusted all the same, since a link put there would lead our own writing elsewhere.
        follow: accept a link, for a root that the user named.
    """
    try:
        got = folder.stat() if follow else folder.lstat()
    except FileNotFoundError:
        return ""
    mode, name = stat.S_IMODE(got.st_mode), shlex.quote(str(folder))
    if not stat.S_ISDIR(got.st_mode):
        return f"{folder} is a link or a file where a store has a directory. Remove it"
    if mode & stat.S_IWOTH:
        return (
            f"{folder} has the mode {mode:04o}, so any user can put code there that boots run. Run: chmod go-w {name},"
            " or use a new directory inside it, which is then made for this user alone"
        )
    if not signed and not _may_own(got.st_uid):
        return (
            f"{folder} belongs to the user {got.st_uid}, who can put code there that this process runs as user"
            f" {os.geteuid()}. Run: chown -R {os.geteuid()} {name}, or sign bundles (WARMSTART_CACHE_SECRET)"
        )
    if not signed and mode & stat.S_IWGRP and not _is_private(got.st_gid, got.st_uid):
        return (
            f"{folder} has the mode {mode:04o}, so all of the group {got.st_gid} can put code there that boots run."
            f" Run: chmod go-w {name}, or sign bundles (WARMSTART_CACHE_SECRET)"
        )
    return ""


def _sign(secret: bytes, parts: tuple[str, ...]) -> str:
    return hmac.new(secret, "\n".join(("warmstart bundle", *parts)).encode(), hashlib.sha256).hexdigest()


def _same(one: str, two: str) -> bool:
    return hmac.compare_digest(one.encode(), two.encode())


def _may_own(owner: int) -> bool:
    """Root, this process, or whoever owns this very code, who could change that instead.

    The last is what a container sees that runs as root on a project mounted from its user's home.
    """
    return owner in (0, os.geteuid()) or (owner != _NOBODY and owner == Path(__file__).stat().st_uid)


def _is_private(group: int, owner: int) -> bool:
    """Whether a group is its owner's alone; a clone made under umask 002 is writable by such a group."""
    if group == 0 and owner == 0:
        return True  # only root puts anybody into root's group
    try:
        account = pwd.getpwuid(owner)
        name, primary = account.pw_name, account.pw_gid
    except KeyError:
        # A container has no accounts of its host; a user's private group has the user's number.
        name, primary = "", owner
    return group == primary and _members(group) <= {name, "root"}


def _members(group: int) -> set[str]:
    try:
        listed = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        listed = set()
    return listed | {account.pw_name for account in pwd.getpwall() if account.pw_gid == group}

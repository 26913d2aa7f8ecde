"""Folders that are being written: each is locked by its writer, so that one whose writer was killed is known by it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = ".recoup-draft-"


@contextmanager
def new_draft(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, which goes whatever happens unless it is renamed.

    A killed process cannot remove its drafts; they go when somebody writes beside them again.
    """
    remove_stale_drafts(folder.parent)
    draft, lock = _locked(folder)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def remove_stale_drafts(parent: Path) -> None:
    """Remove drafts in a folder that belong to this user and that no living process writes."""
    for draft in parent.glob(f"{MARK}*"):
        if draft.is_dir() and not draft.is_symlink() and (lock := _lock(draft, waits=False)) is not None:
            if os.fstat(lock).st_uid == os.getuid():
                shutil.rmtree(draft, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path) -> tuple[Path, int | None]:
    """A draft and its lock. Somebody who cleans up may find it before it is locked: then there is another one."""
    while True:
        draft = Path(tempfile.mkdtemp(prefix=f"{MARK}{folder.name[:100]}-", dir=folder.parent))
        lock = _lock(draft, waits=True)
        if draft.exists():
            return draft, lock
        if lock is not None:
            os.close(lock)


def _lock(draft: Path, *, waits: bool) -> int | None:
    """The lock of a folder, which ends with its process; None where somebody has it or there are no locks."""
    if sys.platform == "win32":
        return None
    import fcntl  # not on Windows

    try:
        descriptor = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor

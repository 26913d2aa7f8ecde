import fcntl
import os

import pytest

from recoup.artefact import drafts
from recoup.artefact.drafts import MARK, new_draft, remove_stale_drafts
from recoup.artefact.writing import require_new


def stale(parent, name="out-abc"):
    """As a killed process leaves it."""
    folder = parent / f"{MARK}{name}"
    folder.mkdir()
    (folder / "plan.json").write_text("{")
    return folder


def test_a_draft_goes_unless_it_is_renamed(tmp_path):
    with pytest.raises(KeyError), new_draft(tmp_path / "out") as draft:
        (draft / "file").write_text("half")
        raise KeyError
    assert not list(tmp_path.iterdir())
    with new_draft(tmp_path / "out") as draft:
        draft.rename(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("start", ["save", "command"])
def test_what_a_killed_process_left_goes_at_the_next_start(tmp_path, start):
    stale(tmp_path)
    if start == "command":
        require_new(tmp_path / "new")
    else:
        with new_draft(tmp_path / "other"):
            pass
    assert not list(tmp_path.iterdir())


def test_what_is_being_written_stays(tmp_path):
    with new_draft(tmp_path / "out") as draft, new_draft(tmp_path / "out") as second:
        remove_stale_drafts(tmp_path)
        assert draft.exists() and second.exists()


def test_what_is_not_ours_stays(tmp_path, monkeypatch):
    (tmp_path / ".out-abcdefgh").mkdir()
    (tmp_path / f"{MARK}file").write_text("a file of somebody's")
    (tmp_path / f"{MARK}link").symlink_to(tmp_path / ".out-abcdefgh")
    before = sorted(tmp_path.iterdir())
    remove_stale_drafts(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    theirs = stale(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    remove_stale_drafts(tmp_path)
    assert theirs.exists()


def test_a_draft_that_is_cleaned_up_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    lock, seen = drafts._lock, []

    def late(draft, *, waits):
        if not seen:
            seen.append(draft)
            draft.rmdir()
        return lock(draft, waits=waits)

    monkeypatch.setattr(drafts, "_lock", late)
    with new_draft(tmp_path / "out") as draft:
        assert draft.exists() and draft != seen[0]


def test_without_locks_nothing_is_removed(tmp_path, monkeypatch):
    left = stale(tmp_path)

    def refuse(descriptor, operation):
        raise OSError("no locks on this disk")

    monkeypatch.setattr(fcntl, "flock", refuse)
    remove_stale_drafts(tmp_path)
    assert left.exists()
    with new_draft(tmp_path / "out") as draft:
        assert draft.exists()

"""A folder appears whole or not at all: full and read-only disks, two writers, what is on disk at which time."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

import recoup
from recoup.artefact import writing
from recoup.errors import ArtefactError
from tests.hostile.artefact_folders import Shuffled


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    return recoup.prune(Shuffled().eval(), [torch.randn(24, 3, 6, 6)], budget=recoup.Budget(width=0.5), method="paper")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("at", range(4))
def test_a_disk_that_is_full_when_a_text_is_written(result, tmp_path, monkeypatch, at):
    """graph.json, plan.json, report.json, report.html: whichever does not fit."""
    write, done = Path.write_text, []

    def fill(self, *args, **kwargs):
        done.append(self)
        return full() if len(done) == at + 1 else write(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(ArtefactError, match="No space left on device.*on a disk with space"):
        result.save(tmp_path / "out")
    assert len(done) == at + 1
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("at", [0, 1])
def test_a_disk_that_is_full_when_tensors_are_written(result, tmp_path, monkeypatch, at):
    """The library that writes them has an error of its own."""
    write, done = writing.save_file, []

    def fill(*args):
        done.append(args)
        if len(done) == at + 1:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        write(*args)

    monkeypatch.setattr(writing, "save_file", fill)
    with pytest.raises(ArtefactError, match="cannot write .*No space left on device"):
        result.save(tmp_path / "out")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("what", ["os.fsync", "tempfile.mkdtemp", "pathlib.Path.rename", "pathlib.Path.mkdir"])
def test_a_disk_that_is_full_at_any_other_step(result, tmp_path, monkeypatch, what):
    monkeypatch.setattr(what, full)
    with pytest.raises(ArtefactError, match="No space left on device"):
        result.save(tmp_path / "out")
    assert names_in(tmp_path) == []


def test_a_place_that_may_only_be_read(result, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ArtefactError, match="is not a folder you may write to"):
        result.save(tmp_path / "out")
    monkeypatch.undo()

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", read_only)
    with pytest.raises(ArtefactError, match="Read-only file system"):
        result.save(tmp_path / "out")
    assert names_in(tmp_path) == []


def test_everything_is_on_disk_before_it_has_its_name(result, tmp_path, monkeypatch):
    seen = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor):
        seen.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def note_rename(self, target):
        seen.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    folder = result.save(tmp_path / "out")
    place = seen.index("rename")
    assert set(names_in(folder)) < set(seen[:place])
    assert seen[place - 1].startswith(".recoup-draft-out-")  # the list of names in the folder
    assert seen[place + 1 :] == [tmp_path.name]


def test_of_two_that_write_one_folder_one_wins_whole(result, tmp_path, monkeypatch):
    """Both are ready before either takes the name."""
    rename, barrier, ends = Path.rename, threading.Barrier(4), []

    def together(self, target):
        barrier.wait(30)
        return rename(self, target)

    def save():
        try:
            ends.append(result.save(tmp_path / "out"))
        except ArtefactError as error:
            ends.append(error)

    monkeypatch.setattr(Path, "rename", together)
    writers = [threading.Thread(target=save) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lost = [end for end in ends if isinstance(end, ArtefactError)]
    assert len(lost) == 3
    assert all("exists already" in str(error) and "nothing was overwritten" in str(error) for error in lost)
    assert names_in(tmp_path) == ["out"]
    recoup.load(tmp_path / "out")


def test_a_link_in_the_way_is_not_followed(result, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ArtefactError, match="exists already"):
        result.save(tmp_path / "out")


def test_a_tensor_that_no_file_holds(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    method = recoup.Paper(classifier=True)
    result = recoup.prune(model, [torch.randn(60, 6)], budget=recoup.Budget(width=0.5), method=method)
    result.model.register_buffer("odd", torch.eye(3).to_sparse())
    with pytest.raises(ArtefactError, match="odd cannot be saved: it is of torch.float32, torch.sparse_coo"):
        result.save(tmp_path / "out")
    result.model.odd = torch.zeros(3, dtype=torch.complex128)
    with pytest.raises(ArtefactError, match="odd cannot be saved: it is of torch.complex128"):
        result.save(tmp_path / "out")
    assert names_in(tmp_path) == []

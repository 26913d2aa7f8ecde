import errno
import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from recoup.errors import ResourceError
from recoup.recovery import activation_store
from recoup.recovery.activation_store import ActivationStore, memory_of, resident_of, size_of, work_of

ROW = 8 * 10  # bytes of ten float64


def value(number, rows=1):
    return {"x": torch.full((rows, 10), float(number), dtype=torch.float64)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where temporary files go during a test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def files(store):
    """How many bytes a store has on disk."""
    return store._spool._end


def test_what_fits_stays_in_memory_and_is_the_same_object(folder):
    store = ActivationStore(limit=2 * ROW)
    left = value(1)
    store.put(0, left)
    assert not files(store)
    assert store.take(0) is left
    assert store.peak == ROW
    store.close()


def test_what_is_too_much_goes_to_disk_and_comes_back_equal(folder):
    store = ActivationStore(limit=2 * ROW)
    for place in range(5):
        store.put(place, value(place))
    assert files(store) == 3 * ROW
    for place in reversed(range(5)):
        assert torch.equal(store.take(place)["x"], value(place)["x"])
    assert store.peak == 2 * ROW
    assert not files(store)
    store.close()


def test_a_place_that_was_taken_from_makes_room(folder):
    store = ActivationStore(limit=ROW)
    for place in range(3):
        store.put(place, value(place))
        assert not files(store)
        store.take(place)
    assert store.peak == ROW
    store.close()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=30), st.integers(0, 6))
@settings(max_examples=50, deadline=None)
def test_what_is_taken_is_what_was_put_last_and_memory_keeps_to_its_limit(steps, rows):
    store, expected = ActivationStore(limit=rows * ROW), {}
    for number, (place, size) in enumerate(steps):
        if place in expected:
            assert torch.equal(store.take(place)["x"], expected.pop(place)["x"])
        expected[place] = value(number, size)
        store.put(place, expected[place])
    for place, left in expected.items():
        assert torch.equal(store.take(place)["x"], left["x"])
    assert store.peak <= rows * ROW
    store.close()


def test_no_memory_at_all_is_enough(folder):
    store = ActivationStore(limit=0)
    store.put(0, value(1))
    assert files(store) == ROW
    assert torch.equal(store.take(0)["x"], value(1)["x"])
    assert store.peak == 0
    store.close()


def test_nothing_has_a_name_even_while_it_is_there(folder):
    store = ActivationStore(limit=0)
    store.put(0, value(1))
    assert not list(folder.iterdir())
    store.close()
    assert not list(folder.iterdir())


def test_tensors_share_memory_afterwards_as_before_and_keep_their_strides(folder):
    store = ActivationStore(limit=0)
    whole = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    complex_value = torch.randn(3, dtype=torch.complex64).conj()
    left = {"whole": whole, "part": whole[1], "half": torch.randn(4).half(), "conj": complex_value}
    store.put(0, left | {"empty": torch.empty(0, 3), "sparse": torch.eye(3).to_sparse()})
    assert files(store) == size_of([whole, left["half"], complex_value])
    found = store.take(0)
    assert all(torch.equal(found[name], left[name]) for name in left)
    assert found["whole"].stride() == whole.stride()
    found["whole"].zero_()
    assert not found["part"].any()
    assert found["empty"].shape == (0, 3)
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    store.close()


def test_room_that_was_freed_is_used_again(folder):
    store = ActivationStore(limit=0)
    for place in range(6):
        store.put(place, value(place))
    for number in range(50):
        place = number % 6
        assert torch.equal(store.take(place)["x"], value(place)["x"])
        store.put(place, value(place))
    assert files(store) == 6 * ROW
    for place in range(6):
        store.take(place)
    assert files(store) == 0
    store.close()


@pytest.mark.parametrize("free", [0, activation_store.CPU_MOST_WORK])
def test_a_disk_without_room_is_said_before_anything_is_written(folder, monkeypatch, free):
    monkeypatch.setattr("recoup.recovery.spool.RESERVE", ROW)
    monkeypatch.setattr("recoup.recovery.spool.free_disk", lambda folder: 3 * ROW if free else 0)
    store = ActivationStore(limit=0)
    if free:
        store.put(0, value(0))
        store.require(3 * ROW)  # one of them is there already
    message = f"activations need 0.0 MB in {folder}, and 0.0 MB are free there. Give fewer calibration images"
    with pytest.raises(ResourceError, match=message):
        store.require(4 * ROW)
    with pytest.raises(ResourceError, match=message):
        store.put(1, value(1, rows=4))
    assert files(store) == (ROW if free else 0)
    store.close()


def test_a_disk_that_fills_up_meanwhile_is_an_error_that_says_so(folder, monkeypatch):
    store = ActivationStore(limit=0)
    store.put(0, value(1))

    class Full:
        def __getattr__(self, name):
            return getattr(store_file, name)

        def write(self, part):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store_file, store._spool._file = store._spool._file, Full()
    with pytest.raises(ResourceError, match=rf"could not be written to {folder} \(No space left on device\)"):
        store.put(1, value(2))
    store._spool._file = store_file
    assert files(store) == ROW
    assert torch.equal(store.take(0)["x"], value(1)["x"])
    store.close()


def test_without_a_place_for_temporary_files_there_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/at/all")
    store = ActivationStore(limit=0)
    with pytest.raises(ResourceError, match="Set TMPDIR to one you may write to"):
        store.put(0, value(1))


def test_whatever_a_value_consists_of_comes_back(folder):
    store = ActivationStore(limit=0)
    given_value = (
        {"a": torch.randn(3, 2), "flag": torch.tensor([True, False]), "shape": [4, 5], "none": None},
        [torch.arange(3), torch.tensor(2.5)],
    )
    store.put(7, given_value)
    first, second = store.take(7)
    assert torch.equal(first["a"], given_value[0]["a"])
    assert torch.equal(first["flag"], given_value[0]["flag"])
    assert (first["shape"], first["none"]) == ([4, 5], None)
    assert all(torch.equal(a, b) for a, b in zip(second, given_value[1], strict=True))
    store.close()


def test_a_place_nobody_has_left_anything_at_is_an_error(folder):
    store = ActivationStore(limit=0)
    with pytest.raises(KeyError, match="3"):
        store.take(3)
    store.close()


def test_storage_that_tensors_share_is_counted_once():
    whole = torch.zeros(6, 10, dtype=torch.float64)
    assert size_of(whole) == 6 * ROW
    assert size_of({"a": whole, "b": (whole.view(10, 6), whole[2:])}) == 6 * ROW
    assert size_of([whole, whole.clone()]) == 12 * ROW
    assert size_of({"a": 3, "b": None}) == 0


def test_a_view_holds_all_of_its_storage():
    assert size_of(torch.zeros(6, 10, dtype=torch.float64)[:1]) == 6 * ROW


@pytest.mark.parametrize("free", [0, 1 << 30, 400 << 30])
def test_on_a_cpu_a_share_of_what_is_free_may_wait_in_memory(monkeypatch, free):
    monkeypatch.setattr(activation_store, "free_on", lambda device: free)
    waiting, working = memory_of(torch.device("cpu")), work_of(torch.device("cpu"))
    assert waiting == min(activation_store.CPU_MOST, free // 4)
    assert resident_of(torch.device("cpu")) == min(activation_store.CPU_RESIDENT, waiting)
    assert working <= waiting


def test_what_is_in_work_is_a_part_of_what_may_wait(monkeypatch):
    assert 0 < work_of(torch.device("cpu")) <= memory_of(torch.device("cpu"))
    on_a_gpu(monkeypatch, free=100, reserved=0, allocated=0)
    assert work_of(torch.device("cuda")) == 10 << 30
    assert memory_of(torch.device("cuda")) == resident_of(torch.device("cuda")) == 50 << 30


def test_what_torch_holds_back_on_a_gpu_is_free(monkeypatch):
    on_a_gpu(monkeypatch, free=60, reserved=70, allocated=30)
    assert work_of(torch.device("cuda")) == 10 << 30
    assert memory_of(torch.device("cuda")) == 50 << 30


def on_a_gpu(monkeypatch, free, reserved, allocated):
    """GiB of its memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 140 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated << 30)

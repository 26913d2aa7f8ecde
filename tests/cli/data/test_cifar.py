import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from recoup.cli.data import open_data
from recoup.cli.input_spec import CIFAR, IMAGENET, unnormalised
from recoup.errors import DataError, UsageError

RAW = unnormalised((3, 32, 32))
PER_FILE = 20


def content(start: int, label_key: bytes = b"labels", classes: int = 10) -> dict[bytes, object]:
    """Images whose first byte is their number, so that each can be recognised."""
    data = np.random.default_rng(start).integers(0, 256, (PER_FILE, 3072), dtype=np.uint8)
    data[:, 0] = np.arange(start, start + PER_FILE)
    return {b"data": data, label_key: [number % classes for number in range(start, start + PER_FILE)]}


@pytest.fixture
def cifar10(tmp_path) -> Path:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for index in range(1, 6):
        (folder / f"data_batch_{index}").write_bytes(pickle.dumps(content(PER_FILE * (index - 1))))
    (folder / "test_batch").write_bytes(pickle.dumps(content(100)))
    return folder


def numbers(data) -> list[int]:
    return [round(value * 255) for images, _ in data for value in images[:, 0, 0, 0].tolist()]


def test_splits(cifar10):
    parts = {
        split: numbers(open_data(f"cifar10:{cifar10}@{split}", RAW, batch_size=7))
        for split in ("train", "test", "calibration", "validation")
    }
    assert parts["train"] == list(range(100))
    assert parts["test"] == list(range(100, 120))
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0)).tolist()
    assert parts["calibration"] == order[:80]
    assert parts["validation"] == order[80:]


def test_default_is_test_and_either_folder_will_do(cifar10):
    inside, above = open_data(f"cifar10:{cifar10}", RAW), open_data(f"cifar10:{cifar10.parent}", RAW)
    assert numbers(inside) == numbers(above) == list(range(100, 120))
    assert above.name == "cifar10@test"
    assert (above.labelled, above.count, above.batches) == (True, 20, 1)


def test_images_are_normalised_planes_and_labels_fit(cifar10):
    expected = content(100)
    ((images, labels),) = open_data(f"cifar10:{cifar10}", CIFAR)
    planes = torch.from_numpy(expected[b"data"]).view(-1, 3, 32, 32).float() / 255
    torch.testing.assert_close(images, CIFAR.normalise(planes))
    assert images.dtype == torch.float32 and labels.dtype == torch.int64
    assert labels.tolist() == expected[b"labels"]


def test_cifar100_has_fine_labels(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name, start in (("train", 0), ("test", 60)):
        fine = content(start, b"fine_labels", classes=100)
        (folder / name).write_bytes(pickle.dumps({**fine, b"coarse_labels": [0] * PER_FILE}))
    ((_, labels),) = open_data(f"cifar100:{tmp_path}@test", RAW)
    assert labels.tolist() == list(range(60, 80))
    assert numbers(open_data(f"cifar100:{tmp_path}@train", RAW)) == list(range(20))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol(cifar10, protocol):
    (cifar10 / "test_batch").write_bytes(pickle.dumps(content(30), protocol=protocol))
    assert numbers(open_data(f"cifar10:{cifar10}", RAW)) == list(range(30, 50))


def test_files_written_by_python_2(cifar10):
    """Python 2 wrote text and raw data as byte strings, and numpy under its old name."""
    data = bytes(content(40)[b"data"].tobytes())
    opcodes = b"".join(
        [
            b"\x80\x02}(U\x04data",
            b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR",
            b"(K\x01K\x14M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89T" + len(data).to_bytes(4, "little") + data + b"tb",
            b"U\x06labels](" + b"K\x07" * PER_FILE + b"eu.",
        ]
    )
    (cifar10 / "test_batch").write_bytes(opcodes)
    data_set = open_data(f"cifar10:{cifar10}", RAW)
    assert numbers(data_set) == list(range(40, 60))


class Attack:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self):
        return (Path.touch, (self.victim,))


def refusal(folder: Path, split: str = "test") -> str:
    with pytest.raises(DataError) as caught:
        open_data(f"cifar10:{folder}@{split}", RAW)
    return str(caught.value)


def test_code_in_a_pickle_is_refused(cifar10, tmp_path):
    victim = tmp_path / "victim"
    (cifar10 / "test_batch").write_bytes(pickle.dumps({**content(0), b"extra": Attack(victim)}))
    message = refusal(cifar10)
    assert "test_batch' asks for pathlib" in message and "could run code" in message
    assert not victim.exists()


@pytest.mark.parametrize("call", [b"cposix\nsystem\n(S'true'\ntR.", b"cbuiltins\neval\n(S'1'\ntR.", b"cnumpy\nload\n."])
def test_other_callables_are_refused(cifar10, call):
    (cifar10 / "test_batch").write_bytes(call)
    assert "could run code" in refusal(cifar10)


@pytest.mark.parametrize("damage", [lambda raw: b"", lambda raw: raw[: len(raw) // 2], lambda raw: b"garbage" + raw])
def test_damaged_files_are_named(cifar10, damage):
    path = cifar10 / "data_batch_3"
    path.write_bytes(damage(path.read_bytes()))
    message = refusal(cifar10, "train")
    assert f"'{path}' is damaged" in message and "unpack the data set again" in message


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({b"data": np.zeros((PER_FILE, 100), np.uint8)}, "not rows of 3072 bytes"),
        ({b"data": np.zeros((PER_FILE, 3072), np.float32)}, "an array of something else than bytes"),
        ({b"data": np.zeros((PER_FILE, 3072), object)}, "an array of something else than bytes"),
        ({b"data": np.zeros((PER_FILE, 48, 64), np.uint8)}, "not rows of 3072 bytes"),
        ({b"labels": [1, 2]}, "20 images but not as many labels"),
        ({b"labels": [10] * PER_FILE}, "its labels are not all from 0 to 9"),
        ({b"labels": ["1"] * PER_FILE}, "its labels are not all from 0 to 9"),
    ],
)
def test_content_that_is_not_cifar(cifar10, change, reason):
    (cifar10 / "test_batch").write_bytes(pickle.dumps({**content(0), **change}))
    assert reason in refusal(cifar10)


def test_content_without_labels(cifar10):
    (cifar10 / "test_batch").write_bytes(pickle.dumps([1, 2]))
    assert "it has no images and 'labels'" in refusal(cifar10)


def test_missing_files(cifar10, tmp_path):
    (cifar10 / "data_batch_4").unlink()
    assert f"'{cifar10 / 'data_batch_4'}' is missing" in refusal(cifar10, "train")
    assert "there is no cifar-10-batches-py in" in refusal(tmp_path / "nowhere")


def test_requests_that_make_no_sense(cifar10):
    with pytest.raises(UsageError, match=r"cifar10 has no split 'trian'. Did you mean 'train'\? Use one of train"):
        open_data(f"cifar10:{cifar10}@trian", RAW)
    with pytest.raises(UsageError, match="'cifar10' does not say where the data is"):
        open_data("cifar10", RAW)
    with pytest.raises(DataError, match=r"shape \(3, 32, 32\), but the model expects \(3, 224, 224\)"):
        open_data(f"cifar10:{cifar10}", IMAGENET)


# An array of objects whose bytes are the addresses of them: Python's own unpickler reads there, and crashes.
ADDRESSES = (
    b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
    b"(K\x01K\x01K\x01\x86cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
    b"\x89U\x08AAAAAAAAtbU\x06labels]K\x01au."
)


def test_an_array_of_addresses_is_refused(cifar10):
    (cifar10 / "test_batch").write_bytes(ADDRESSES)
    assert "an array of something else than bytes" in refusal(cifar10)


def array(shape: bytes, kind: bytes = b"U\x02u1", state: bytes = b"U\x04AAAA") -> bytes:
    return (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
        b"(K\x01" + shape + b"cnumpy\ndtype\n" + kind + b"K\x00K\x01\x87R\x89" + state + b"tbU\x06labels]K\x01au."
    )


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (array(b"K\x01M\x00\x0c\x86"), "not rows of 3072 bytes"),  # fewer bytes than the shape says
        (array(b"J\xff\xff\xff\xffM\x00\x0c\x86"), "a shape that is none"),
        (array(b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fM\x00\x0c\x86"), "not rows of 3072 bytes"),
        (array(b"K\x01M\x00\x0c\x86", state=b"]"), "an array of something else than bytes"),
        (array(b"K\x01M\x00\x0c\x86", kind=b"U\x02O8"), "an array of something else than bytes"),
        (b"\x80\x02}(r\xff\xff\xff\xff.", "damaged"),  # a memo of four billion places
        (b"\x80\x02(\x89" + b"(" * 1_000_100 + b".", "instructions"),
        (b"\x80\x04(K\x01\x85\x8f.", "could run code"),  # a set, by an opcode that is not needed
        (b"(i__main__\nAttack\n.", "could run code"),
        (b"}c_codecs\nencode\n(V" + b"a" * 5000 + b"\np1\nVlatin1\ntR0" * 1 + b".", "could run code"),
        (b"(" + b"]" + b"c_codecs\nencode\n(V" + b"a" * 5000 + b"\np1\nVlatin1\np2\ntR"
         + b"c_codecs\nencode\n(g1\ng2\ntR" * 40 + b"t.", "more bytes than the file has"),
        (b")" + b"2\x86" * 60 + b"N}s.", "could run code"),  # a key that would take for ever to hash
        (b")" + b"q\x01h\x01\x86" * 60 + b"q\x01}h\x01Ns.", "keys that are no short texts"),
        (b"cnumpy\ndtype\n(]" + b"q\x01(h\x01h\x01l" * 60 + b"tR.", "an array of something else than bytes"),
        (b"}K\x01b.", "could run code"),
        (b"\x80\x02.", "damaged"),
        (b"\x80\x02N0.", "could run code"),
    ],
)  # fmt: skip
def test_instructions_that_no_array_needs_are_refused_at_once(cifar10, raw, reason):
    (cifar10 / "test_batch").write_bytes(raw)
    started = time.perf_counter()
    assert reason in refusal(cifar10)
    assert time.perf_counter() - started < 5


def test_arrays_in_column_order(cifar10):
    turned = content(30)
    turned[b"data"] = np.asfortranarray(turned[b"data"])
    for protocol in (2, 5):
        (cifar10 / "test_batch").write_bytes(pickle.dumps(turned, protocol=protocol))
        assert numbers(open_data(f"cifar10:{cifar10}", RAW)) == list(range(30, 50))


def test_only_regular_files_of_a_possible_size_are_read(cifar10, monkeypatch):
    path = cifar10 / "data_batch_3"
    path.unlink()
    os.mkfifo(path)
    assert f"'{path}' is missing" in refusal(cifar10, "train")
    monkeypatch.setattr("recoup.cli.data.cifar.LARGEST_FILE", 1000)
    assert "more than the 1,000 that such a file can have" in refusal(cifar10)

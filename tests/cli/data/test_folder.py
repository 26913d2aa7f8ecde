import os
import socket
import struct
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recoup.cli.data import open_data
from recoup.cli.input_spec import CIFAR, IMAGENET, InputSpec, unnormalised
from recoup.errors import DataError, UsageError

SMALL = unnormalised((3, 16, 16))


def write(path: Path, colour: tuple[int, int, int] = (255, 0, 0), size: tuple[int, int] = (20, 20)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def read(root: Path, input: InputSpec = SMALL, **options):
    return list(open_data(f"folder:{root}", input, **options))


def test_class_folders_are_numbered_by_sorted_name(tmp_path):
    for name, red in (("b", 100), ("a", 50), ("c", 150)):
        for index in range(2):
            write(tmp_path / name / f"{index}.png", (red, 0, 0))
    ((images, labels),) = read(tmp_path)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2] and labels.dtype == torch.int64
    assert (images[:, 0].amax((1, 2)) * 255).round().int().tolist() == [50, 50, 100, 100, 150, 150]
    assert images.shape == (6, 3, 16, 16) and images.dtype == torch.float32


def test_flat_folder_is_unlabelled(tmp_path):
    for suffix in ("png", "jpg", "JPEG", "bmp", "webp"):
        write(tmp_path / f"image.{suffix}")
    (tmp_path / "notes.txt").write_text("not an image")
    write(tmp_path / ".hidden.png")
    data = open_data(f"folder:{tmp_path}", SMALL, batch_size=2)
    assert (data.labelled, data.count, data.batches, data.name) == (False, 5, 3, f"folder:{tmp_path.name}")
    assert [len(batch) for batch in data] == [2, 2, 1]


def test_an_empty_class_keeps_its_number(tmp_path):
    (tmp_path / "a").mkdir()
    write(tmp_path / "b" / "0.png")
    ((_, labels),) = read(tmp_path)
    assert labels.tolist() == [1]


def test_normalisation(tmp_path):
    write(tmp_path / "0.png", (255, 0, 51))
    (images,) = read(tmp_path, CIFAR)
    expected = CIFAR.normalise(torch.tensor([1.0, 0.0, 0.2]).view(1, 3, 1, 1)).expand(1, 3, 32, 32)
    torch.testing.assert_close(images, expected)


def test_grey_input(tmp_path):
    write(tmp_path / "0.png", (0, 255, 0))
    (images,) = read(tmp_path, unnormalised((1, 16, 16)))
    assert images.shape == (1, 1, 16, 16)
    assert images.mean().item() == pytest.approx(150 / 255)  # the luma of pure green, in bytes


def test_large_inputs_cut_the_centre_of_a_256_frame(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (256, 300, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "0.png")
    (images,) = read(tmp_path, unnormalised(IMAGENET.shape))
    expected = torch.from_numpy(pixels[16:240, 38:262]).permute(2, 0, 1).float() / 255
    torch.testing.assert_close(images[0], expected)


def test_small_inputs_are_filled_exactly(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "0.png")
    (images,) = read(tmp_path, unnormalised((3, 64, 64)))
    torch.testing.assert_close(images[0], torch.from_numpy(pixels[:, 8:72]).permute(2, 0, 1).float() / 255)


@pytest.mark.parametrize("size", [(31, 200), (200, 31), (5, 5), (1, 400)])
@pytest.mark.parametrize("shape", [(3, 100, 100), (3, 20, 30), (3, 30, 20)])
def test_any_size_is_scaled_to_cover_the_input(tmp_path, size, shape):
    write(tmp_path / "0.png", (255, 255, 255), size)
    (images,) = read(tmp_path, unnormalised(shape))
    assert images.shape == (1, *shape)
    assert images.min() == 1  # black would be a border that the image does not cover


def test_requests_and_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="'folder:' does not say where the images are"):
        open_data("folder:", SMALL)
    with pytest.raises(DataError, match=f"There is no image folder '{tmp_path / 'nowhere'}'"):
        read(tmp_path / "nowhere")
    with pytest.raises(DataError, match=f"There are no images in '{tmp_path}'"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"cannot be brought to the shape \(4, 8, 8\)"):
        read(tmp_path, unnormalised((4, 8, 8)))


def test_loose_images_beside_class_folders(tmp_path):
    write(tmp_path / "loose.png")
    write(tmp_path / "a" / "0.png")
    with pytest.raises(DataError, match=r"holds both images \('loose.png'\) and sub-folders \('a'\)"):
        read(tmp_path)


@pytest.mark.parametrize("damage", [lambda raw: b"no image", lambda raw: raw[: len(raw) // 2], lambda raw: b""])
def test_unreadable_image_is_named(tmp_path, damage):
    path = tmp_path / "0.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"The image '{path}' could not be read"):
        read(tmp_path)


def test_images_are_decoded_batch_by_batch(tmp_path):
    write(tmp_path / "0.png")
    (tmp_path / "1.png").write_bytes(b"damaged, but only met in the second batch")
    batches = iter(open_data(f"folder:{tmp_path}", SMALL, batch_size=1))
    assert next(batches).shape == (1, 3, 16, 16)
    with pytest.raises(DataError):
        next(batches)


def test_missing_pillow_says_what_to_install(tmp_path, monkeypatch):
    write(tmp_path / "0.png")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"needs 'PIL.Image', which is not installed.* pip install 'recoup\[data\]'"):
        read(tmp_path)


def refusal(root: Path, input: InputSpec = SMALL) -> str:
    started = time.perf_counter()
    with pytest.raises(DataError) as caught:
        read(root, input)
    assert time.perf_counter() - started < 5
    return str(caught.value)


def png(width: int, height: int, content: bytes = b"") -> bytes:
    """A grey image of one bit a pixel; without `content` the pixels are missing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", content), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "nowhere", "loop"])
def test_what_is_no_regular_file_is_named_and_not_waited_for(tmp_path, kind):
    path = tmp_path / "0.png"
    listening = socket.socket(socket.AF_UNIX)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            listening.bind(os.path.relpath(path))
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.symlink_to(path if kind == "loop" else tmp_path / "nothing")
    assert f"'{path}'" in refusal(tmp_path)
    listening.close()


@pytest.mark.parametrize("size", [(13000, 13000), (60000, 60000), (2**31 - 1, 2**31 - 1), (53 << 20, 1)])
def test_a_few_bytes_that_stand_for_many_pixels_are_refused_before_they_are_decoded(tmp_path, size):
    (tmp_path / "0.png").write_bytes(png(*size))
    assert f"The image '{tmp_path / '0.png'}'" in refusal(tmp_path)


def test_an_image_that_becomes_large_when_it_is_scaled_is_refused(tmp_path):
    (tmp_path / "0.png").write_bytes(png(1, 1_000_000, zlib.compress(bytes(2_000_000))))
    assert "would be scaled to 256 x 256,000,000 pixels" in refusal(tmp_path, IMAGENET)


def test_many_pixels_within_the_limit_are_read(tmp_path):
    (tmp_path / "0.png").write_bytes(png(4000, 2000, zlib.compress(bytes(2000 * 501))))
    (images,) = read(tmp_path)
    assert images.shape == (1, 3, 16, 16) and images.max() == 0


def test_only_the_formats_that_are_claimed_are_decoded(tmp_path):
    Image.new("RGB", (20, 20)).save(tmp_path / "0.png", format="TIFF")
    assert f"The image '{tmp_path / '0.png'}' could not be read" in refusal(tmp_path)


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 16, 16)])
def test_sixteen_bits_are_scaled_and_not_cut_off(tmp_path, shape):
    Image.fromarray(np.full((16, 16), 0x4080, np.uint16)).save(tmp_path / "0.png")
    (images,) = read(tmp_path, unnormalised(shape))
    torch.testing.assert_close(images, torch.full((1, *shape), 0x40 / 255))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_other_modes_become_colours(tmp_path, mode):
    Image.new("RGB", (16, 16), (255, 255, 255)).convert(mode).save(tmp_path / ("0.jpg" if mode == "CMYK" else "0.png"))
    (images,) = read(tmp_path)
    assert images.shape == (1, 3, 16, 16) and images.min() > 0.99

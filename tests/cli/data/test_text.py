import json

import pytest
import torch

from recoup.cli.data import open_data
from recoup.cli.input_spec import IMAGENET
from recoup.errors import DataError, UsageError


def blocks(spec, **options):
    return torch.cat(list(open_data(spec, IMAGENET, **options)))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.txt").write_text("world")
    (tmp_path / "a.md").write_text("hello ")
    (tmp_path / "c.py").write_text("no text")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "d.rst").write_text("!é")
    return tmp_path


def test_the_files_of_a_folder_are_one_text_cut_into_blocks_of_bytes(folder):
    found = blocks(f"text:{folder}?block=4")
    assert found.dtype == torch.int64
    assert bytes(found.flatten().tolist()).decode(errors="replace") == "hello world!"
    assert found.shape == (3, 4)  # the two bytes of é fill no block


def test_a_file_is_a_text_too_and_a_limit_draws_blocks(folder):
    (folder / "b.txt").write_text("x" * 1000)
    data = open_data(f"text:{folder / 'b.txt'}", IMAGENET, batch_size=3)
    assert (data.count, data.batches, data.labelled) == (7, 3, False)
    assert blocks(f"text:{folder / 'b.txt'}", limit=2).shape == (2, 128)


def test_a_tokeniser_of_a_folder_is_used(folder):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hello": 5, "world": 7, "?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    found = blocks(f"text:{folder}?tokenizer={folder}&block=2")
    assert found.tolist() == [[5, 7], [0, 0]]  # each file by itself; the last has two words that nobody knows


@pytest.mark.parametrize(
    ("said", "failure", "message"),
    [
        ("?blocks=4", UsageError, "write text:PATH"),
        ("?block=1", UsageError, "Give 2 or more"),
        ("?block=x", UsageError, "Give 2 or more"),
        ("?block=1000", DataError, "fewer than a block of 1000"),
        ("?tokenizer=/nowhere", DataError, "no tokeniser '/nowhere'"),
        ("/more?block=2", None, ""),
        ("/nothing", DataError, "cannot be opened"),
    ],
)
def test_what_is_no_text_is_said(folder, said, failure, message):
    if failure is None:
        assert len(blocks(f"text:{folder}{said}")) == 1
        return
    with pytest.raises(failure, match=message):
        blocks(f"text:{folder}{said}")


def test_a_folder_without_text_and_no_folder_at_all(tmp_path):
    with pytest.raises(DataError, match="There is no text"):
        blocks(f"text:{tmp_path}")
    with pytest.raises(UsageError, match="write text:PATH"):
        blocks("text:")


def test_a_damaged_tokeniser_is_told(folder):
    pytest.importorskip("tokenizers")
    (folder / "tokenizer.json").write_text(json.dumps({"model": 3}))
    with pytest.raises(DataError, match="cannot be read"):
        blocks(f"text:{folder}?tokenizer={folder}")

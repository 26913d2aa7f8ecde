import os

import pytest
import torch

from recoup.inputs import resources
from recoup.inputs.resources import MemoryWatch, free_disk, free_memory, free_on, readable

GB = 1 << 30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 8 GiB free, whose files say what a test writes there."""
    monkeypatch.setattr(resources, "PROC", tmp_path / "proc")
    monkeypatch.setattr(resources, "GROUPS", tmp_path / "groups")
    write(tmp_path / "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_what_this_machine_says_is_between_nothing_and_all_it_has():
    everything = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_memory() <= everything
    assert free_on(torch.device("cpu")) > 0
    assert free_disk("/") > 0


def test_without_groups_the_machine_says_it(machine):
    assert free_memory() == 8 * GB


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/box/inner", "box", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/box/inner",
            "memory/box",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_a_container_has_less(machine, line, folder, names):
    """The limit may be that of a group around the one that the process is in."""
    write(machine / "proc/self/cgroup", f"3:cpu:/other\n{line}\n")
    limit, used, reclaimable = names
    write(machine / "groups" / folder / "inner" / limit, "max")
    write(machine / "groups" / folder / limit, str(3 * GB))
    write(machine / "groups" / folder / used, str(2 * GB))
    write(machine / "groups" / folder / "memory.stat", f"anon 5\n{reclaimable} {GB // 2}\n")
    assert free_memory() == GB + GB // 2
    write(machine / "groups" / folder / used, str(9 * GB))
    assert free_memory() == 0


def test_another_system_counts_pages(machine, monkeypatch):
    (machine / "proc/meminfo").unlink()
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 10, "SC_AVPHYS_PAGES": 7, "SC_PHYS_PAGES": 100}.__getitem__)
    assert free_memory() == 70
    monkeypatch.setattr(os, "sysconf_names", {})
    assert free_memory() == 250
    monkeypatch.delattr(os, "sysconf")
    assert free_memory() == resources.UNKNOWN


def test_bytes_are_said_in_words():
    assert (readable(2_500_000_000), readable(400_000)) == ("2.5 GB", "0.4 MB")


@pytest.mark.parametrize(
    ("earlier", "since", "exact", "said"),
    [(GB, 3 * GB, True, readable(3 * GB)), (3 * GB, 3 * GB, False, f"at most {readable(3 * GB)}")],
)
def test_a_peak_of_gpu_memory_is_ours_only_above_an_earlier_one(monkeypatch, earlier, since, exact, said):
    asked = []
    peaks = iter((earlier, since))

    def highest(device):
        asked.append(device)
        return next(peaks)

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", highest)
    device = torch.device("cuda:1")
    peak = MemoryWatch(device).peak()
    assert (peak.bytes, peak.is_exact) == (3 * GB, exact)
    assert str(peak).startswith(said) and ("before" in str(peak)) is not exact
    assert asked == [device, device]


def test_a_counter_that_somebody_set_back_tells_no_peak(monkeypatch):
    peaks = iter((3 * GB, GB))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(peaks))
    assert MemoryWatch(torch.device("cuda")).peak() is None


def test_there_is_no_peak_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: pytest.fail("asked a GPU"))
    assert MemoryWatch(torch.device("cpu")).peak() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_peak_is_that_of_torch_and_its_counters_are_left_alone():
    torch.cuda.reset_peak_memory_stats()
    watch = MemoryWatch(torch.device("cuda"))
    held = torch.cuda.memory_allocated()
    torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    peak = watch.peak()
    assert peak.is_exact and peak.bytes == torch.cuda.max_memory_allocated() >= held + (1 << 28)

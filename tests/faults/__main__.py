"""End the command line at random moments, and run it where it cannot write.

python -m tests.faults --count 50 --seed 0
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.commands import Command, Place, end_at, is_complete, moments, new_place, seconds_needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    longest = seconds_needed()
    broken = 0
    for moment, kind in moments(given.count, given.seed, longest):
        wrong = end_at(moment, kind)
        broken += bool(wrong)
        print(f"{kind.name} after {moment:6.3f} s: {wrong or 'held'}", flush=True)
    for test in (full_disk_for_activations, full_disk_for_the_result, read_only_output, two_writers):
        wrong = test()
        broken += bool(wrong)
        print(f"{test.__name__.replace('_', ' ')}: {wrong or 'held'}", flush=True)
    print(f"{given.count} moments in {longest:.1f} s of work and 4 other faults: {broken} broken")
    sys.exit(bool(broken))


def full_disk_for_activations() -> str:
    with new_place() as place, mounted("size=16k") as small:
        return refusal(Command(Place(place.output, small)), place, "TMPDIR")


def full_disk_for_the_result() -> str:
    """Of several sizes: the disk is full at another file each time."""
    for size in ("4k", "64k", "256k", "512k"):
        with new_place() as place, mounted(f"size={size}") as small:
            wrong = refusal(Command(place, output=small / "out"), place, "No space left on device")
            if wrong or any(small.iterdir()):
                return wrong or f"left on a disk of {size}: {list(small.iterdir())}"
    return ""


def read_only_output() -> str:
    with new_place() as place, mounted("ro") as small:
        return refusal(Command(place, output=small / "out"), place, "cannot write")


def two_writers() -> str:
    with new_place() as place:
        first, second = Command(place), Command(place)
        codes = sorted(command.finish()[0] for command in (first, second))
        if codes != [0, 1] or not is_complete(place.output) or place.leftovers:
            return f"exit codes {codes}, left {place.leftovers}"
    return ""


def refusal(command: Command, place: Place, word: str) -> str:
    code, said = command.finish()
    if code != 1 or word not in said or "Traceback" in said:
        return f"exit code {code}: {said[-1000:]}"
    if place.output.exists() or place.leftovers:
        return f"left: {place.leftovers}"
    return ""


@contextmanager
def mounted(options: str) -> Iterator[Path]:
    """A disk in memory, of a size of its own; only root may have one."""
    folder = Path(tempfile.mkdtemp(prefix="faults-disk-"))
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", str(folder)], check=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

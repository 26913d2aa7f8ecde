"""What every test runs under."""

import pytest
import torch

# Small tensors: threads would spend their time waiting for each other.
torch.set_num_threads(1)

# The files that take longest, which are begun first: the cores then end together.
LONGEST = (
    "tests/test_random_wirings.py",
    "tests/test_torchvision.py",
    "tests/cli/test_demo.py",
    "tests/allocation/test_shares.py",
    "tests/test_pipeline.py",
    "tests/test_laws.py",
    "tests/test_methods.py",
)


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0], len(LONGEST)))


@pytest.fixture(autouse=True)
def _random_numbers_start_alike():
    """What a test draws does not depend on the tests that ran before it in the same process."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _gradients_stay_on():
    """A test that leaves them off would fail another one."""
    yield
    was_on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert was_on

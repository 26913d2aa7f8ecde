import pytest

from recoup.statistics.cache import MOST, Cache


class Maker:
    """Makes something new every time, and counts how often."""

    def __init__(self):
        self.made = 0

    def __call__(self):
        self.made += 1
        return object()


def test_a_result_is_made_once():
    cache, make = Cache(), Maker()
    first = cache("kind", "key", make)
    assert all(cache("kind", "key", make) is first for _ in range(3))
    assert make.made == 1


def test_other_keys_and_other_kinds_have_results_of_their_own():
    cache, make = Cache(), Maker()
    found = [cache(kind, key, make) for kind in ("one", ("two", 2)) for key in ("a", b"b")]
    assert len(set(map(id, found))) == make.made == 4
    assert cache(("two", 2), "a", make) is found[2]
    assert make.made == 4


def test_nothing_is_a_result_too():
    cache, make = Cache(), Maker()
    assert cache("kind", "key", lambda: None) is None
    assert cache("kind", "key", make) is None
    assert make.made == 0


def test_the_last_few_of_a_kind_stay():
    cache, make = Cache(), Maker()
    found = [cache("kind", number, make) for number in range(MOST + 2)]
    for number in range(2, MOST + 2):
        assert cache("kind", number, make) is found[number]
    assert make.made == MOST + 2
    assert cache("kind", 0, make) is not found[0]
    assert make.made == MOST + 3


@pytest.mark.parametrize("most", [1, 2, 7])
def test_how_many_stay_can_be_said(most):
    cache, make = Cache(), Maker()
    found = [cache("kind", number, make, most) for number in range(10)]
    last = [cache("kind", number, make, most) for number in range(10 - most, 10)]
    assert [id(result) for result in last] == [id(result) for result in found[10 - most :]]
    assert make.made == 10
    cache("kind", 9 - most, make, most)
    assert make.made == 11


def test_many_results_of_one_kind_leave_another_alone():
    cache, make = Cache(), Maker()
    reference = cache("reference", "held out", make)
    for number in range(3 * MOST):
        cache("quick", number, make)
    assert cache("reference", "held out", make) is reference


def test_what_fails_is_not_remembered_and_drops_nothing():
    cache, make = Cache(), Maker()
    found = [cache("kind", number, make) for number in range(MOST)]

    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache("kind", "other", fail)
    assert [cache("kind", number, make) for number in range(MOST)] == found
    assert cache("kind", "other", make) is not None


def test_making_may_ask_for_other_kinds():
    cache, make = Cache(), Maker()
    outer = cache("outer", "key", lambda: (cache("inner", "key", make),))
    assert cache("inner", "key", make) is outer[0]
    assert make.made == 1


def test_every_cache_is_its_own():
    one, other, make = Cache(), Cache(), Maker()
    assert one("kind", "key", make) is not other("kind", "key", make)

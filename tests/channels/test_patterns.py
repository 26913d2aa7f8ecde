"""Groups by name: of their own, of a module that makes them, with wildcards."""

import pytest
import torch

import recoup
from recoup.channels.patterns import LEFT_ALONE, Choice, matching, widths_by_group
from recoup.errors import UsageError
from tests.zoo import ZOO

# residual: what every group is made by
STEM, INNER, WIDER, LAST = "stem.0", "a.0.0", "b.0.0", "skip.0"


def lock_others(structure, only, exclude):
    return Choice.of(only, exclude).lock_others(structure)


@pytest.fixture(scope="module")
def structure():
    return recoup.trace(ZOO["residual"].build(6), ZOO["residual"].batch(2)).structure


def prunable(structure):
    return {group.name for group in structure.prunable}


def test_the_groups_are_those_that_the_other_tests_name(structure):
    assert prunable(structure) == {STEM, INNER, WIDER, LAST}
    assert [group.name for group in structure.groups] == [STEM, INNER, LAST, WIDER, "head"]
    assert structure.group(STEM).producers == ("stem.0", "a.1.0")
    assert structure.group(LAST).producers == ("skip.0", "b.1.0")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("stem.0", [STEM]),  # its own name
        ("a.1.0", [STEM]),  # another layer that makes it
        ("b.1", [LAST]),  # a module around one of these
        ("a", [STEM, INNER]),
        ("b", [LAST, WIDER]),
        ("skip", [LAST]),
        ("*", [STEM, INNER, LAST, WIDER, "head"]),
        ("*.0.0", [INNER, WIDER]),
        ("[ab].0", [INNER, WIDER]),
        ("?.1.0", [STEM, LAST]),
        ("a.?", [STEM, INNER]),
        ("s*", [STEM, LAST]),
        ("head", ["head"]),
    ],
)
def test_a_pattern_matches_names_modules_and_wildcards(structure, pattern, expected):
    assert matching(structure, pattern, "only") == expected


@pytest.mark.parametrize("pattern", ["ste", "stem.1", "tem.0", "B", "stem.0.weight", "", "a.??", "b.1.0.*"])
def test_a_part_of_a_name_is_no_name(structure, pattern):
    with pytest.raises(UsageError, match="unknown group or module in only"):
        matching(structure, pattern, "only")


@pytest.mark.parametrize("what", ["only", "exclude"])
def test_an_unknown_name_is_refused_with_all_names_and_the_nearest(structure, what):
    names = "stem.0, a.0.0, skip.0, b.0.0, head"
    with pytest.raises(
        UsageError, match=rf"unknown group or module in {what} 'stem.o'; there are {names}\. Did you mean 'stem.0'\?"
    ):
        lock_others(structure, **{"only": [], "exclude": [], what: ["a", "stem.o"]})
    with pytest.raises(UsageError, match=rf"unknown group or module in {what} 'zzz'; there are {names}\.$"):
        lock_others(structure, **{"only": [], "exclude": [], what: ["zzz"]})


def test_an_unknown_name_of_a_width_is_refused_too(structure):
    with pytest.raises(UsageError, match=r"unknown group or module in widths 'b\.2'; there are stem\.0, .*head"):
        widths_by_group(structure, {"b.2": 3})


@pytest.mark.parametrize("what", ["only", "exclude"])
def test_a_text_in_the_place_of_a_list_is_refused(structure, what):
    with pytest.raises(UsageError, match=rf"{what} must be a list of names, got the text 'stem'. Write \['stem'\]"):
        lock_others(structure, **{"only": [], "exclude": [], what: "stem"})


@pytest.mark.parametrize(
    ("only", "exclude", "expected"),
    [
        ((), (), {STEM, INNER, WIDER, LAST}),
        (["a.0"], (), {INNER}),
        (["a.0", "b.0.0"], (), {INNER, WIDER}),
        (["b"], (), {WIDER, LAST}),
        ((), ["b"], {STEM, INNER}),
        ((), ["*.0.0", "skip"], {STEM}),
        (["a", "b"], ["b.1"], {STEM, INNER, WIDER}),
        (["a.0"], ["a"], set()),
        ((), ["*"], set()),
        (iter(["b.0"]), iter(["a"]), {WIDER}),
        ({"b.0": None}, {"a"}, {WIDER}),
    ],
)
def test_what_is_not_named_or_excluded_is_locked(structure, only, exclude, expected):
    locked = lock_others(structure, only, exclude)
    assert prunable(locked) == expected
    for before in structure.prunable:
        group = locked.group(before.name)
        assert (LEFT_ALONE in group.reasons) is (group.name not in expected)
        assert torch.equal(group.locked, before.locked if group.name in expected else torch.ones_like(before.locked))


def test_a_group_that_is_left_alone_says_so_first(structure):
    locked = lock_others(structure, [], ["head", "stem"])
    assert locked.group(STEM).reasons[0] == LEFT_ALONE
    assert locked.group("head").reasons == structure.group("head").reasons  # it has to stay anyway
    assert LEFT_ALONE not in locked.group(INNER).reasons


def test_nothing_asked_for_changes_nothing(structure):
    same = lock_others(structure, [], [])
    for group, before in zip(same.groups, structure.groups, strict=True):
        assert torch.equal(group.locked, before.locked) and group.reasons == before.reasons


def test_the_structure_given_stays_as_it_is(structure):
    before = [group.locked.clone() for group in structure.groups]
    lock_others(structure, ["a.0"], ["b"])
    assert all(torch.equal(group.locked, mask) for group, mask in zip(structure.groups, before, strict=True))


def test_tracing_takes_names_too():
    model, batch = ZOO["residual"].build(6), ZOO["residual"].batch(2)
    assert prunable(recoup.trace(model, batch, only=["b*"], exclude=["skip"]).structure) == {WIDER}
    assert recoup.inspect(model, batch, exclude=["stem", "b"]).prunable == 1
    with pytest.raises(UsageError, match="unknown group or module in exclude 'nobody'"):
        recoup.trace(model, batch, exclude=["nobody"])


def test_a_pruning_touches_nothing_but_what_is_named():
    entry = ZOO["residual"]
    result = recoup.prune(
        entry.build(6), [entry.batch(60)], method="paper", budget=recoup.Budget(width=0.5), only=["b"], exclude=["b.1"]
    )
    assert {row.name for row in result.report.groups if row.after < row.before} == {WIDER}


def test_widths_are_by_group_whatever_they_are_named_by(structure):
    assert widths_by_group(structure, {}) == {}
    assert widths_by_group(structure, {"a.1.0": 4}) == {STEM: 4}
    assert widths_by_group(structure, {"*.0.0": 3, "skip": 5}) == {INNER: 3, WIDER: 3, LAST: 5}
    assert widths_by_group(structure, {"[ab]": 3, "b.0": 2}) == {STEM: 3, INNER: 3, WIDER: 2, LAST: 3}


@pytest.mark.parametrize(("name", "width"), [(STEM, 7), (INNER, 8), (STEM, -1)])
def test_a_width_that_the_group_cannot_have_is_refused(structure, name, width):
    has = structure.group(name).width
    with pytest.raises(UsageError, match=rf"{name} cannot have {width} channels: it has {has}\."):
        widths_by_group(structure, {name: width})


def test_a_locked_group_can_only_have_the_width_it_has(structure):
    assert widths_by_group(structure, {"head": 4}) == {"head": 4}
    with pytest.raises(UsageError, match=r"head cannot have 2 channels: it has 4, of which 4 are locked: .*returns it"):
        widths_by_group(structure, {"head": 2})
    locked = lock_others(structure, [], ["stem"])
    with pytest.raises(UsageError, match=rf"stem\.0 cannot have 3 channels: .*{LEFT_ALONE}"):
        widths_by_group(locked, {"stem": 3})

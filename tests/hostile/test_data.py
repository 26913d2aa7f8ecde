import os
from pathlib import Path

from tests.hostile import data


def test_changed_files_are_read_or_refused():
    outcomes = data.run(60, 0)
    assert [outcome for outcome in outcomes if not outcome.is_lawful] == []
    assert [outcome.seed for outcome in outcomes] == list(range(60))
    assert {outcome.what for outcome in outcomes} == {"read", "refused"}


def test_a_case_is_known_by_its_seed():
    assert data.make_case(7) == data.make_case(7)
    assert len({data.make_case(seed).content for seed in range(20)}) > 10


def test_every_way_to_break_the_law_is_seen(tmp_path):
    cases = [data.Case(number, "", "file", b"") for number in range(len(WAYS))]
    found = data.outcomes_of(cases, tmp_path, misbehave)
    assert [outcome.what for outcome in found] == list(WAYS)


def misbehave(case: data.Case, where: Path) -> data.Outcome:
    list(WAYS.values())[case.seed](where)
    return data.Outcome(case.seed, "read")


WAYS = {
    "raw exception": lambda where: {}["nothing"],
    "side effect": lambda where: (where / "file").open("a"),
    "file written": lambda where: os.link(where / "file", where / "other"),
    "read": lambda where: None,
    "crash": lambda where: os._exit(1),
}

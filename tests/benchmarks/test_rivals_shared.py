import copy
import json

import pytest
import torch
from benchmarks.baselines import count_macs
from benchmarks.rivals import __main__ as command
from benchmarks.rivals import cac, channels, metapruning, sfp, torch_pruning, training
from benchmarks.rivals.channels import best_first, counts_by_score, counts_by_share, counts_by_weight, keep_first
from benchmarks.rows import Store

from recoup.channels.cost import cost
from recoup.cli.importing import import_library
from recoup.errors import BudgetError, ModelError, UsageError
from tests.benchmarks.rival_networks import (
    NONE,
    SMALL,
    alive,
    half_dead,
    labelled,
    pictures,
    residual,
    share_of_the_living,
    subject,
)


@pytest.mark.parametrize("name", SMALL)
def test_every_recipe_meets_its_budget_on_coupled_channels_and_leaves_the_model_alone(name):
    model, images = residual(), pictures(64)
    before = copy.deepcopy(model.state_dict())
    smaller, seconds = command.RECIPES[name].prune(model, images, labelled(model, images), SMALL[name])
    share = count_macs(smaller, images[:1]) / count_macs(model, images[:1])
    assert 0.48 <= share <= 0.5
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model.training and not any(module.training for module in smaller.modules())
    assert "tuning" in seconds and all(value >= 0 for value in seconds.values())


def test_a_gate_of_zero_is_a_channel_cut_off():
    for model in (residual(6), half_dead()):
        whole = channels.subject_of(model, pictures(4), 1.0)
        score = torch.arange(whole.structure.width) * 7 % 5
        counts = {group.name: group.width // 2 for group in whole.groups}
        keep = keep_first(whole.structure, best_first(whole.structure, score), counts)
        # A residual stream has shifts of batch norms in channels that are off; nobody reads them.
        gated = channels.gated(whole, keep.float(), pictures(4))
        torch.testing.assert_close(gated, channels.cut(whole, keep)(pictures(4)), rtol=1e-4, atol=1e-5)


def test_folding_a_gate_computes_what_the_gate_does():
    whole = channels.subject_of(residual(6), pictures(4), 1.0)
    gate = torch.linspace(0.2, 1.5, whole.structure.width)
    expected = channels.gated(whole, gate, pictures(4)).detach()
    channels.fold(whole, gate)
    torch.testing.assert_close(whole.model(pictures(4)).detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.83])
def test_widths_use_the_budget_up(share):
    asked = channels.subject_of(residual(), pictures(2), share)
    score = torch.rand(asked.structure.width, generator=torch.Generator().manual_seed(1))
    weights = {group.name: 1.0 + number for number, group in enumerate(asked.groups)}
    for counts in (counts_by_share(asked, score), counts_by_score(asked, score), counts_by_weight(asked, weights)):
        keep = keep_first(asked.structure, best_first(asked.structure, score), counts)
        left = cost(asked.structure, asked.model, keep).macs / cost(asked.structure, asked.model).macs
        assert share - 0.02 <= left <= share + 1e-6


def test_scores_are_compared_across_groups():
    living, _, _ = subject()
    first, second = living.groups
    score = torch.zeros(living.structure.width)
    score[second.channels] = 1.0
    counts = counts_by_score(living, score)
    assert counts[first.name] < counts[second.name] == second.width


def test_sums_over_columns_are_those_of_all_readers():
    whole = channels.subject_of(residual(5), pictures(2), 1.0)
    stream = whole.structure.group("stem.0")
    readers = whole.readers_of(stream)
    assert len(readers) == 3
    values = {reader.weight: whole.model.get_parameter(reader.weight).detach().abs() for reader in readers}
    expected = sum(value.double().sum((0, 2, 3)) for value in values.values())
    torch.testing.assert_close(channels.column_sums(whole, values)[stream.channels], expected)


def test_a_share_of_nothing_is_refused():
    with pytest.raises(BudgetError, match=r"share=0 of the MACs cannot be kept"):
        channels.subject_of(half_dead(), pictures(2), 0)


def test_finetuning_learns_and_zero_epochs_change_nothing():
    model, images = half_dead(), pictures()
    labels = (labelled(model, images) + 1) % 4
    same = training.finetuned(model, images, labels, training.Schedule(0, 0.1, augment=False))
    assert all(torch.equal(a, b) for a, b in zip(same.parameters(), model.parameters(), strict=True))
    schedule = training.Schedule(8, 0.05, batch=32, augment=False)
    learnt, again = (training.finetuned(model, images, labels, schedule) for _ in range(2))
    assert training.right(learnt(images), labels) > training.right(model(images), labels) + 0.3
    assert all(torch.equal(a, b) for a, b in zip(learnt.parameters(), again.parameters(), strict=True))


def test_batch_statistics_leave_the_norms_as_they_were():
    model = half_dead()
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad(), training.batch_statistics(model):
        assert not torch.allclose(model(5 * pictures() + 3), half_dead()(5 * pictures() + 3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if "tracked" not in name)
    assert not any(module.training for module in model.modules()) and model[0][1].momentum == 0.1


def settings_said(words: str):
    return command.settings_of(command.parse(f"{words} --cifar A --checkpoints B".split()))


def test_settings_come_from_the_command_line():
    settings = settings_said("cac --share 0.4 --epochs 3 --search-epochs 2 --seed 5 --set criterion=sampled off=0.2")
    assert (settings.share, settings.criterion, settings.off) == (0.4, "sampled", 0.2)
    assert (settings.tuning.epochs, settings.pruning.epochs, settings.tuning.seed) == (3, 2, 5)
    scratch = settings_said("metapruning --set from_scratch=False")
    assert scratch.from_scratch is False and scratch.tuning.epochs == metapruning.Settings().tuning.epochs
    assert settings_said("metapruning --set from_scratch=true").from_scratch is True


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cac --set speed=3", "cac has no settings speed"),
        ("cac --share 0.5 --set share=0.3", "Give --share."),
        ("amc --set walks", "Give --set walks=VALUE."),
        ("amc --set walks=ten", "--set walks=ten: walks must be a whole number."),
        ("amc --set noise=much", "--set noise=much: noise must be a number."),
        ("metapruning --set from_scratch=1", "--set from_scratch=1: from_scratch must be true or false."),
        ("amc --set walks=50", "walks=50 end before the agent learns"),
        ("cac --search-epochs 0", "pruning.epochs must be a whole number of at least 1, got 0"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_a_mistake_of_usage(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        settings_said(words)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_the_command_asks_for_a_recipe_and_for_places(capsys):
    for words, message in (("--cifar A", "which recipe?"), ("sfp --cifar A", "--checkpoints must be said")):
        with pytest.raises(SystemExit):
            command.parse(words.split())
        assert message in capsys.readouterr().err


def test_a_row_that_is_there_is_not_made_again(tmp_path, capsys, monkeypatch):
    path = tmp_path / "rows.json"
    words = f"sfp --cifar A --checkpoints B --network resnet20 --out {path}"
    options = command.parse(words.split())
    case = command.case_of(options)
    Store(path, command.common(options)).add(command.Row(case, command.Outcome(removed=0.5)))
    command.main(words.split())
    assert "has this row already" in capsys.readouterr().err
    assert len(json.loads(path.read_text())["rows"]) == 1


class FakeBench:
    """What the command asks of a bench: calibration images that are told from all others, and a row of what it got."""

    def __init__(self) -> None:
        self.model, self.example = half_dead(), pictures(1)
        self.calibration = lambda seed: [
            (torch.full((2, 3, 6, 6), float(seed + n)), torch.full((2,), n)) for n in (1, 2)
        ]

    @property
    def splits(self):
        raise AssertionError("test images are for the outcome alone")

    def outcome(self, smaller, removed, seconds):
        return command.Outcome(removed=removed, seconds=sum(seconds.values()), stages=seconds)


def test_the_command_prunes_on_calibration_images_and_files_what_was_removed(tmp_path, monkeypatch, capsys):
    path, given, bench = tmp_path / "rows.json", [], FakeBench()

    def prune(model, images, labels, settings):
        given.extend([model, images, labels, settings])
        whole = channels.subject_of(model, pictures(1), 1.0)
        return channels.cut(whole, alive(whole.structure)), {"cut": 2.0, "tuning": 3.0}

    monkeypatch.setattr(command.networks, "open_bench", lambda network, options: bench)
    monkeypatch.setattr(sfp, "prune", prune)
    command.main(f"sfp --cifar A --checkpoints B --share 0.4 --seed 5 --epochs 3 --out {path}".split())
    model, images, labels, settings = given
    assert model is bench.model and images.flatten(1)[:, 0].tolist() == [6, 6, 7, 7] and labels.tolist() == [1, 1, 2, 2]
    assert (settings.share, settings.training.seed, settings.tuning.epochs) == (0.4, 5, 3)
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["method"], row["seed"], row["share"], row["seconds"]) == ("sfp", 5, 0.6, 5.0)
    assert row["removed"] == pytest.approx(1 - share_of_the_living(bench.model, pictures(1)))
    assert "sfp" in capsys.readouterr().err


def test_torch_pruning_is_not_charged_for_the_search_for_its_ratio(monkeypatch):
    log = []

    def timed(seconds, stage, work):
        seconds[stage] = 1.0
        log.append(stage)
        return work()

    def ratio(model, example, share, *, ignored):
        log.append(f"ratio for {share} but {ignored}")
        return 0.7

    def pruned(model, example, ignored, share):
        log.append(f"cut at {share} but {ignored}")
        return model

    for name, fake in (("timed", timed), ("torch_pruning_ratio", ratio), ("torch_pruned", pruned)):
        monkeypatch.setattr(torch_pruning, name, fake)
    settings = torch_pruning.Settings(share=0.5, tuning=NONE)
    _, seconds = torch_pruning.prune(half_dead(), pictures(), labelled(half_dead(), pictures()), settings)
    assert log == ["ratio for 0.5 but 4", "cut", "cut at 0.7 but 4", "tuning"] and set(seconds) == {"cut", "tuning"}


def test_without_torch_pruning_it_is_said_what_to_install():
    try:
        import_library("torch_pruning", "torch-pruning", ModelError)
    except ModelError:
        with pytest.raises(ModelError, match="torch-pruning"):
            torch_pruning.prune(half_dead(), pictures(), labelled(half_dead(), pictures()), torch_pruning.Settings())
    else:
        pytest.skip("torch-pruning is installed")


def test_a_criterion_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="criterion='best' is not known"):
        cac.Settings(criterion="best")

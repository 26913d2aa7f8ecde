"""The paper's figures as data: what can be seen of them to be right."""

import pytest
from benchmarks.paper.published import (
    BASE,
    HOURS,
    LIMITED_DATA,
    ORDER_TOLERANCES,
    ORDERS,
    PUBLISHED,
    PUBLISHED_SECONDS,
    RESNET50,
    RESNET50_RIVALS,
    VGG16_RIVALS,
)


@pytest.mark.parametrize("figures", [PUBLISHED, RESNET50])
def test_a_larger_tolerance_removes_more_and_is_not_exceeded(figures):
    assert list(figures) == sorted(figures, key=lambda figure: figure.tolerance)
    assert [f.removed for f in figures] == sorted(f.removed for f in figures)
    assert all(0 < figure.test_drop < figure.tolerance for figure in figures)


def test_rivals_stand_by_what_they_remove_and_name_their_source():
    for rivals, count in ((VGG16_RIVALS, 6), (RESNET50_RIVALS, 15)):
        assert len(rivals) == count and len(set(rivals)) == count
        assert [rival.removed for rival in rivals] == sorted(rival.removed for rival in rivals)
        assert all(0 < rival.removed < 100 and -1 < rival.test_drop < 8 and rival.source for rival in rivals)


def test_hours_by_stage_sum_up_to_the_total():
    for hours in HOURS.values():
        assert hours.statistics + hours.selection + hours.search == pytest.approx(hours.total, abs=0.02)
    assert PUBLISHED_SECONDS == 720 and HOURS["vgg16"].retraining == 2.28


def test_every_order_has_a_figure_for_every_tolerance():
    assert set(ORDERS) == {"bottom-up", "top-down", "random"}
    assert {len(figures) for figures in ORDERS.values()} == {len(ORDER_TOLERANCES)}


def test_noise_removes_half_of_what_images_do():
    assert max(LIMITED_DATA["noise"].values()) < min(LIMITED_DATA["other"].values())
    assert LIMITED_DATA["noise"]["50"] / LIMITED_DATA["own"]["50"] == pytest.approx(0.494, abs=1e-3)
    assert BASE["vgg16"] == 93.96

"""The benchmark of residual streams: what it asks for, and how it is shown."""

import torch
from benchmarks.streams import NETWORKS, Case, cases, digits, macs_of, measured, nn, table


def test_a_row_cuts_the_stream_to_the_width_that_was_asked_for():
    torch.set_num_threads(1)
    trained = digits(nn.LayerNorm, 2)
    row = measured(trained, Case(NETWORKS[2], "alone", "components", 0.5), "fast")
    assert row.stream == "24 of 48" and 0.45 < row.macs < 0.55 and row.kl > 0
    assert macs_of(trained.model, trained.inputs) > 300_000


def test_the_table_pairs_the_ways():
    rows = [
        {"network": case.network, "part": case.part, "way": case.way, "share": case.share}
        | {"kl": 0.25, "score": 90.0, "stream": "3 of 4"}
        for case in cases(NETWORKS[2])
    ]
    lines = table(rows).splitlines()
    assert f"| {NETWORKS[2]} | 85% | 0.2500 (90; stream 3 of 4) | 0.2500 (90; stream 3 of 4) |" in lines
    assert len(lines) == 2 + 4 + 1 + 2 + 4 and len(table(rows[1:]).splitlines()) == len(lines) - 1

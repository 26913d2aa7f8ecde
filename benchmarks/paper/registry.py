"""All experiments by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.paper import fig4, fig5, fig6, fig7, fig8, retraining, table1, table2, table3, table4, table5, weighting
from benchmarks.paper.experiment import Experiment

_MODULES = (table1, table2, table3, table4, table5, fig4, fig5, fig6, fig7, fig8, weighting, retraining)
EXPERIMENTS: Mapping[str, Experiment] = MappingProxyType(
    {module.EXPERIMENT.name: module.EXPERIMENT for module in _MODULES}
)

"""The paper's tables and figures, each an experiment of its own: `python -m benchmarks.paper NAME`.

- `published`: the figures that the paper and others report.
- `cases`: what is asked for and what came of it, as rows.
- `workbench`: a network with its images; statistics and rankings that many cases share.
- `opening`, `smoke`: networks from checkpoints, and small ones that are trained in the run.
- `experiment`: cases become rows, a table, a figure and a block of docs/paper.md.
- `table1` to `retraining`: one experiment each.
- `searches`: rows of the paper's search that were stored before there were experiments.
"""

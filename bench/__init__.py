"""Benchmarks: one file a question; speed is held here and nowhere in the tests.

`python -m bench store|actors|replay|train [--json FILE] [--peers] [--quick]` measures, prints a
table, and writes dated JSON and a plot into `bench/results/`. `bench.report` has the rows, the
timing helpers and the output; `bench.floors` what the machine itself can do; `bench.peers` runs
other systems beside ours in an environment of their own. Nothing in the packages imports this.
"""

from bench.report import BenchArgs, Goal, Report, Row, Samples, at_least, at_most

__all__ = ["BenchArgs", "Goal", "Report", "Row", "Samples", "at_least", "at_most"]

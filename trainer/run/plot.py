"""Draws `reward.png` from a run's metrics. Imports matplotlib lazily; called when a run ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.metrics import read_metrics

__all__ = ["plot_rewards", "smoothed"]

_WINDOW_SHARE = 20
"""The smooth line averages over a twentieth of the run."""


def plot_rewards(metrics_file: Path, png: Path, title: str) -> None:
    """Rewards of all scored rollouts and of held-out evaluations over train steps."""
    import matplotlib
    from matplotlib.figure import Figure

    records = list(read_metrics(metrics_file))
    train = [(r["train_step"], r["reward"]) for r in records if "reward" in r]
    held_out = [(r["train_step"], r["eval/reward"]) for r in records if "eval/reward" in r]
    with matplotlib.rc_context({"font.size": 10}):
        figure = Figure(figsize=(8.0, 4.5), layout="constrained")
        axes = figure.subplots()
        if train:
            steps, rewards = [s for s, _ in train], [r for _, r in train]
            axes.plot(
                steps, rewards, color="tab:blue", alpha=0.5, linewidth=1, label="all rollouts"
            )
            if len(rewards) >= 2 * _WINDOW_SHARE:  # else it would only cover the line itself
                axes.plot(
                    steps,
                    smoothed(rewards),
                    color="tab:blue",
                    linewidth=2,
                    label="all rollouts, smoothed",
                )
        if held_out:
            axes.plot(
                *zip(*held_out, strict=True), "o-", color="tab:orange", label="held-out prompts"
            )
        axes.set(xlabel="train step", ylabel="mean reward", title=title)
        axes.grid(alpha=0.3)
        if train or held_out:
            axes.legend(loc="best")
        figure.savefig(png, dpi=120)


def smoothed(values: Sequence[float]) -> list[float]:
    """Running mean over the last twentieth of the values."""
    width = max(1, len(values) // _WINDOW_SHARE)
    sums, out = 0.0, []
    for index, value in enumerate(values):
        sums += value
        if index >= width:
            sums -= values[index - width]
        out.append(sums / min(index + 1, width))
    return out

"""Draws: the right distribution, the right log-probs, and nobody's neighbours matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trainer.engine.protocol import SamplingParams
from trainer.engine.sampling import BatchSampling, sample, seed_of, uniforms

VOCAB = 12
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def _draw(count: int, **params: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    batch = BatchSampling.of(
        [SamplingParams(**params)] * count, list(range(count)), torch.device("cpu")
    )
    tokens, logp = sample(
        LOGITS.expand(count, VOCAB).contiguous(), batch, np.full(count, 9, dtype=np.uint64)
    )
    return tokens.numpy(), logp.numpy()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    count = 40_000
    tokens, logp = _draw(count, temperature=temperature)
    wanted = torch.softmax(LOGITS / temperature, 0).numpy()
    seen = np.bincount(tokens, minlength=VOCAB) / count
    bound = 5 * np.sqrt(wanted * (1 - wanted) / count) + 1e-9
    assert (np.abs(seen - wanted) < bound).all()
    np.testing.assert_allclose(logp, np.log(wanted)[tokens], atol=1e-5)


def test_greedy_takes_the_most_likely_token() -> None:
    tokens, logp = _draw(5, temperature=0.0)
    assert set(tokens.tolist()) == {int(LOGITS.argmax())}
    np.testing.assert_allclose(logp, float(torch.log_softmax(LOGITS, 0).max()), atol=1e-6)


@pytest.mark.parametrize(("params", "size"), [({"top_k": 3}, 3), ({"top_p": 0.6}, None)])
def test_cuts_keep_the_head_of_the_distribution_and_its_proportions(
    params: dict[str, Any], size: int | None
) -> None:
    tokens, logp = _draw(20_000, **params)
    probabilities = torch.softmax(LOGITS, 0)
    order = probabilities.argsort(descending=True)
    if size is None:
        size = int((probabilities[order].cumsum(0) < 0.6).sum()) + 1
    kept = order[:size]
    assert set(tokens.tolist()) == set(kept.tolist())
    wanted = (probabilities[kept] / probabilities[kept].sum()).numpy()
    seen = np.array([(tokens == token).mean() for token in kept.tolist()])
    assert np.abs(seen - wanted).max() < 0.02
    # Log-probs stay those of the whole distribution: what the learner recomputes.
    np.testing.assert_allclose(logp, probabilities.log().numpy()[tokens], atol=1e-5)


def test_a_draw_depends_on_seed_and_position_only() -> None:
    params = [SamplingParams(), SamplingParams(top_k=2), SamplingParams(temperature=0.3)]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    place = np.array([4, 40, 400], dtype=np.uint64)
    together, _ = sample(logits, BatchSampling.of(params, [7, 8, 9], torch.device("cpu")), place)
    for row in range(3):
        batch = BatchSampling.of([params[row]], [7 + row], torch.device("cpu"))
        alone, _ = sample(logits[row : row + 1], batch, place[row : row + 1])
        assert int(alone[0]) == int(together[row])


def test_uniforms_are_uniform_over_seeds_and_over_positions() -> None:
    many = np.arange(100_000, dtype=np.uint64)
    one = np.zeros_like(many)
    for draws in (uniforms(many, one), uniforms(one, many), uniforms(many, many)):
        assert draws.min() >= 0.0
        assert draws.max() < 1.0
        assert abs(draws.mean() - 0.5) < 0.005
        counts, _ = np.histogram(draws, bins=100, range=(0, 1))
        assert np.abs(counts - 1000).max() < 180
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02


def test_a_token_of_zero_probability_is_never_drawn() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 3] = logits[0, 8] = 0.0
    seen = set()
    for seed in range(200):
        batch = BatchSampling.of([SamplingParams()], [seed], torch.device("cpu"))
        seen.add(int(sample(logits, batch, np.array([1], dtype=np.uint64))[0][0]))
    assert seen == {3, 8}


def test_seeds_of_sessions_differ_and_do_not_change() -> None:
    assert seed_of(0, "a") == seed_of(0, "a")
    assert len({seed_of(0, "a"), seed_of(0, "b"), seed_of(1, "a")}) == 3
    assert seed_of(0, "run-7-0") == 17858692907577921613

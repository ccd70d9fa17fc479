"""Our losses beside TRL's on the same batch and model, where TRL is installed.

TRL is no dependency; `make test-trl` installs it and runs this.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.model.families import family, sampled_traces
from trainer.advantage import batch_advantages
from trainer.learner import Learner
from trainer.model.config import LearnerConfig
from trainer.segment import IGNORE_LABEL, Trace

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (
        {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.1},
        {"loss": "grpo", "normalize": "rollout", "clip_low": 0.1, "clip_high": 0.1},
    ),
    "dapo": (
        {"loss_type": "dapo", "epsilon": 0.1, "epsilon_high": 0.28},
        {"loss": "grpo", "normalize": "token", "clip_low": 0.1, "clip_high": 0.28},
    ),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "epsilon": 0.1, "epsilon_high": 0.1, "max_completion_length": 40},
        {
            "loss": "grpo",
            "normalize": "constant",
            "constant_tokens": 40,
            "clip_low": 0.1,
            "clip_high": 0.1,
        },
    ),
    "gspo": (
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.01,
            "epsilon_high": 0.02,
        },
        {"loss": "gspo", "normalize": "rollout", "clip_low": 0.01, "clip_high": 0.02},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.1},
        {"loss": "cispo", "normalize": "token", "clip_high": 0.1},
    ),
}


def _padded(traces: list[Trace]) -> dict[str, torch.Tensor]:
    """The batch as TRL wants it: prompts padded on the left, completions on the right."""
    starts = [int(np.flatnonzero(trace.labels != IGNORE_LABEL)[0]) for trace in traces]
    prompt, completion = max(starts), max(len(t) - s for t, s in zip(traces, starts, strict=True))
    shape = {"prompt": (len(traces), prompt), "completion": (len(traces), completion)}
    made = {
        f"{part}_{kind}": torch.zeros(size, dtype=torch.int64)
        for part, size in shape.items()
        for kind in ("ids", "mask")
    }
    made["old_per_token_logps"] = torch.zeros(shape["completion"])
    for row, (trace, start) in enumerate(zip(traces, starts, strict=True)):
        ids = torch.tensor(trace.token_ids, dtype=torch.int64)
        rest = len(trace) - start
        made["prompt_ids"][row, prompt - start :] = ids[:start]
        made["prompt_mask"][row, prompt - start :] = 1
        made["completion_ids"][row, :rest] = ids[start:]
        made["completion_mask"][row, :rest] = 1
        made["old_per_token_logps"][row, :rest] = torch.tensor(trace.logprobs[start:])
    return made


def _trl_trainer(model: Any, tokenizer: Any, folder: Path, **settings: Any) -> Any:
    tokenizer.save(folder)
    from transformers import AutoTokenizer

    config = trl.GRPOConfig(
        output_dir=str(folder / "out"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        beta=0.0,
        gradient_checkpointing=False,
        per_device_train_batch_size=8,
        num_generations=4,
        **settings,
    )
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1<"] * 8}),
        processing_class=AutoTokenizer.from_pretrained(str(folder)),
    )


@pytest.mark.filterwarnings("default")  # TRL's own and those of what it imports
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_trl(name: str, tmp_path: Path) -> None:
    theirs, ours = CASES[name]
    model, tokenizer = family("llama")
    rng = np.random.default_rng(0)
    traces = sampled_traces(model, tokenizer, 8)
    for trace in traces:  # as if an older policy had sampled them, so that some ratios are clipped
        trace.logprobs[trace.labels != IGNORE_LABEL] += rng.normal(0, 0.2, trace.n_trainable)
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]
    advantages = np.concatenate(batch_advantages(rewards, "grpo"))

    reference, _ = family("llama", attention="sdpa")
    trainer = _trl_trainer(reference, tokenizer, tmp_path, **theirs)
    batch = _padded(traces)
    batch["advantages"] = torch.tensor(advantages)
    batch["num_items_in_batch"] = batch["completion_mask"].sum()
    trainer.current_gradient_accumulation_steps = 1
    reference.train()
    loss = trainer._compute_loss(reference, batch)
    loss.backward()
    wanted = {n: p.grad for n, p in reference.named_parameters()}

    learner = Learner(model, LearnerConfig(clip_norm=1e9, lr=0.0, **ours))
    seen: dict[str, torch.Tensor] = {}
    original = learner.optimizer.clip

    def clip() -> torch.Tensor:
        seen.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        return original()

    learner.optimizer.clip = clip  # type: ignore[method-assign]
    figures = learner.train_step(traces, advantages)
    assert figures["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    if name != "gspo":
        assert figures["clip_frac"] > 0
    for key, gradient in wanted.items():
        torch.testing.assert_close(seen[key], gradient, rtol=2e-3, atol=1e-5, msg=lambda m: m)

"""The supervised start: a model that has never seen the task answers some of it, so that
reinforcement learning has rewards to look at.

Owns the training loop on (prompt, answer) pairs and its cache on disk: the same model, pairs and
settings give the same weights, computed once. Runs in the learner's process before its first train
step; one thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.engine.batching import Batcher
from trainer.engine.model_runner import ModelRunner
from trainer.engine.protocol import GenerateRequest, Generation, SamplingParams
from trainer.engine.sequence import Sequence as EngineSequence
from trainer.errors import ConfigError
from trainer.model.cache import writable_cache
from trainer.model.config import EngineConfig, WarmupConfig
from trainer.model.packed_forward import PackedTraces, score, trained_positions
from trainer.model.tokenizer import ModelTokenizer
from trainer.segment import IGNORE_LABEL, Trace

__all__ = ["Pairs", "accuracy", "warm_up"]

Pairs = Callable[[int], tuple[str, str]]
"""Example number → (prompt text, answer text). Numbers from 0 are trained on; negative numbers from
-1 down are held out and must be other examples."""
_FORMAT = 2
"""Part of the cache key: raised when the loop changes what it computes."""
_LOGIT_BYTES = 1 << 28


def warm_up(
    model: Any,
    tokenizer: ModelTokenizer,
    config: WarmupConfig,
    pairs: Pairs,
    cache_dir: Path | None = None,
    *,
    key: str = "",
    progress: Callable[[int, float, float | None], None] | None = None,
) -> dict[str, float]:
    """Trains `model` in place until the held-out accuracy reaches `config.target`.

    `key` names the pairs in the cache; the model's own weights are part of the key anyway. Without
    `cache_dir` nothing is cached. `progress(step, loss, accuracy or None)` is called after each
    step. → `steps`, `loss`, `accuracy`, and `cached` (1.0 when nothing had to be trained). Raises
    ConfigError for an answer that is empty.
    """
    if config.steps_max == 0:
        return {"steps": 0.0, "loss": 0.0, "accuracy": 0.0, "cached": 0.0}
    file = None if cache_dir is None else cache_dir / f"{_digest(model, config, key)}.safetensors"
    if file is not None and file.exists():
        return {**_load(model, file), "cached": 1.0}
    if file is not None:
        writable_cache(file.parent)
    result = _train(model, tokenizer, config, pairs, progress)
    if file is not None:
        _save(model, file, result)
    return {**result, "cached": 0.0}


def accuracy(model: Any, tokenizer: ModelTokenizer, config: WarmupConfig, pairs: Pairs) -> float:
    """Share of the held-out prompts whose answer, sampled at temperature 1, is right to the letter.

    The same prompts and seeds each time.
    """
    examples = [pairs(-1 - index) for index in range(config.eval_prompts)]
    params = SamplingParams(max_new_tokens=config.answer_tokens_max)
    runner = ModelRunner(model, EngineConfig(max_batch=min(256, len(examples)), prefix_bytes=0))
    batcher = Batcher(runner, EngineConfig(prefix_bytes=0), tokenizer.decode)
    for index, (prompt, _) in enumerate(examples):
        context = np.array(tokenizer.encode(prompt), dtype=np.int32)
        name = str(index)
        batcher.waiting.append(
            EngineSequence(
                request=GenerateRequest(name, name, context, params),
                context=context,
                length_max=len(context) + config.answer_tokens_max,
                seed=config.seed + index,
                stop_ids=frozenset({tokenizer.eos_token_id}),
            )
        )
    try:
        right = 0
        with torch.inference_mode():
            while batcher.busy:
                batcher.admit(model_step=0)
                batcher.decode(model_step=0)
        for sequence, outcome in batcher.take_outcomes():
            if not isinstance(outcome, Generation):
                raise outcome
            right += outcome.text == examples[int(sequence.request.session_id)][1]
    finally:
        runner.close()
    return right / len(examples)


def _train(
    model: Any,
    tokenizer: ModelTokenizer,
    config: WarmupConfig,
    pairs: Pairs,
    progress: Callable[[int, float, float | None], None] | None,
) -> dict[str, float]:
    adam = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=config.betas, weight_decay=0.0, fused=True
    )
    loss, reached, step = 0.0, 0.0, 0
    for step in range(1, config.steps_max + 1):
        first = (step - 1) * config.batch
        batch = [_example(tokenizer, pairs(first + index)) for index in range(config.batch)]
        loss = _step(model, adam, batch, config.clip_norm)
        looked = step % config.eval_every == 0 or step == config.steps_max
        if looked:
            reached = accuracy(model, tokenizer, config, pairs)
        if progress is not None:
            progress(step, loss, reached if looked else None)
        if looked and reached >= config.target:
            break
    return {"steps": float(step), "loss": loss, "accuracy": reached}


def _step(model: Any, adam: torch.optim.Optimizer, batch: list[Trace], clip_norm: float) -> float:
    positions = [trained_positions(trace) for trace in batch]
    packed = PackedTraces(batch, positions, model.device, routing=False)
    scores = score(model, packed, temperature=1.0, logit_bytes=_LOGIT_BYTES, entropy_grad=False)
    loss = -scores.logp.mean()
    adam.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    adam.step()
    return float(loss.detach())


def _example(tokenizer: ModelTokenizer, pair: tuple[str, str]) -> Trace:
    """Prompt, answer and end; the answer and the end are trained on."""
    prompt, answer = (tokenizer.encode(text) for text in pair)
    if not prompt or not answer:
        raise ConfigError(f"a warm-up example needs a prompt and an answer; given {pair!r}")
    ids = np.array([*prompt, *answer, tokenizer.eos_token_id], dtype=np.int32)
    labels = ids.copy()
    labels[: len(prompt)] = IGNORE_LABEL
    return Trace(
        token_ids=ids,
        labels=labels,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        model_steps=np.full(len(ids), -1, dtype=np.int32),
    )


def _digest(model: Any, config: WarmupConfig, key: str) -> str:
    """Names the result: the weights that it starts from, the settings, the pairs."""
    digest = hashlib.sha256(
        json.dumps([_FORMAT, key, dataclasses.asdict(config), torch.__version__]).encode()
    )
    for name, value in model.named_parameters():
        digest.update(name.encode())
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(raw.data)
    return f"warmup-{digest.hexdigest()[:24]}"


def _load(model: Any, file: Path) -> dict[str, float]:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as stored:
        numbers = stored.metadata()  # in no order
        result = {name: float(numbers[name]) for name in ("steps", "loss", "accuracy")}
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(stored.get_tensor(name))
    return result


def _save(model: Any, file: Path, result: dict[str, float]) -> None:
    """Whole or not at all: written beside and renamed."""
    from safetensors.torch import save_file

    tensors = {name: value.detach().contiguous() for name, value in model.named_parameters()}
    metadata = {name: repr(number) for name, number in result.items()}
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".warmup-") as scratch:
        part = Path(scratch) / file.name
        save_file(tensors, str(part), metadata=metadata)
        os.replace(part, file)

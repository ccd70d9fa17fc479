"""TRL's GRPOTrainer on the work of `bench.train`: same model, task, batch and lengths, one thread.

Generation and training take turns in one process: that is how it runs on one machine. The learning
rate is zero in effect, so that every step is the same work, as in bench/balanced.yaml.
"""

from __future__ import annotations

import itertools
import os
import random
import string
import sys
import tempfile
import time
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from bench.peers import emit
from bench.report import Row, Samples, pin

SUBJECT = f"TRL {trl.__version__}"
SKIPPED_STEPS = 5
# name: (prompts, rollouts a prompt, new tokens)
MIXES = {"balanced": (8, 8, 24), "quickstart": (32, 8, 7)}
ALPHABET = string.digits + string.ascii_letters + "<>+-*/=., :;?!()[]"


def tokenizer() -> Any:
    """One token a character."""
    words = ["<pad>", "<eos>", "<unk>", *ALPHABET]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def model(vocab_size: int) -> Any:
    """The model of bench/balanced.yaml."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=vocab_size,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            intermediate_size=256,
            norm_topk_prob=True,
            tie_word_embeddings=True,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def prompts(n: int) -> Dataset:
    """Digits to sort: `7204<` asks for `0247`."""
    draw = random.Random(0)
    numbers = ["".join(draw.choices(string.digits, k=draw.randint(4, 6))) for _ in range(n)]
    return Dataset.from_dict({"prompt": [number + "<" for number in numbers]})


def reward(completions: list[str], **_: Any) -> list[float]:
    """Share of digits: cheap, and never equal for a whole group."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


class StepClock(TrainerCallback):  # type: ignore[misc]  # the peer has no types
    """When each step ended."""

    def __init__(self) -> None:
        self.ends_ns: list[int] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        self.ends_ns.append(time.perf_counter_ns())


def measure(name: str, steps: int, folder: str) -> list[Row]:
    """Rows of one mix."""
    n_prompts, per_prompt, new_tokens = MIXES[name]
    chars = tokenizer()
    clock = StepClock()
    trainer = GRPOTrainer(
        model=model(len(chars)),
        reward_funcs=reward,
        processing_class=chars,
        train_dataset=prompts(4 * n_prompts * (steps + SKIPPED_STEPS)),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=n_prompts * per_prompt,
            num_generations=per_prompt,
            max_completion_length=new_tokens,
            temperature=1.0,
            top_k=0,
            beta=0.0,
            learning_rate=1e-12,
            max_steps=steps + SKIPPED_STEPS,
            save_strategy="no",
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()
    ends = clock.ends_ns[SKIPPED_STEPS - 1 :]
    step = Samples(tuple(float(b - a) for a, b in itertools.pairwise(ends)))
    return [step.row(f"train step, {name}", SUBJECT)]


def main() -> int:
    """Rows of both mixes."""
    pin(0)
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    steps = 8 if "--quick" in sys.argv else 25
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as folder:
        rows = [row for name in MIXES for row in measure(name, steps, folder)]
    return emit(rows)


if __name__ == "__main__":
    sys.exit(main())

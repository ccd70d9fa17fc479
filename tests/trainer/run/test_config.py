"""Configuration mistakes: all of them, at once, with their place, before anything starts."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ConfigMistakes, load, resolved
from trainer.config.docs import main as config_docs
from trainer.config.parsing import parse_bytes

GOOD = """\
model:
  config: {architecture: Qwen3MoeForCausalLM, num_experts: 8}
  tokenizer: char
tasks:
  - name: sort
    source: {dataset: number_sorting, render: compact_sorting}
    judge: exact
"""

DENSE = GOOD.replace("Qwen3MoeForCausalLM, num_experts: 8", "Qwen3ForCausalLM")


def mistakes(tmp_path: Path, text: str, *overrides: str) -> dict[str, str]:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigMistakes) as caught:
        load(file, overrides)
    return {m.path: m.message for m in caught.value.mistakes}


def test_a_short_file_is_completed_with_every_default_and_loads_again(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD)
    config = load(file, ["schedule.steps=7", "learner.lr=3e-4", "schedule=sync"])
    assert (config.schedule.steps, config.schedule.name, config.learner.lr) == (7, "sync", 3e-4)
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(resolved(config)))
    assert load(again) == config


def test_overrides_reach_behind_a_shorthand_and_into_lists(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD + "schedule: sync\n")
    config = load(file, ["schedule.steps=7", "tasks[0].weight=2"])
    assert (config.schedule.name, config.schedule.steps, config.tasks[0].weight) == ("sync", 7, 2.0)


def test_an_override_that_goes_into_a_list_without_a_number_is_told_how(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD)
    for path in ("tasks.0.weight", "tasks.weight"):
        with pytest.raises(ConfigMistakes, match=r"tasks is a list: name the item, as in tasks\[0"):
            load(file, [f"{path}=2"])


def test_a_shorthand_override_keeps_the_rest_of_its_section(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD + "schedule: {steps: 7}\n")
    config = load(file, ["schedule=sync"])
    assert (config.schedule.name, config.schedule.steps) == ("sync", 7)


def test_another_model_replaces_the_one_that_is_written_out(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    config = load(file, [f"model={tmp_path}", "learner.replay=false"])
    assert (config.model.path, config.model.config) == (str(tmp_path), None)


def test_every_kind_of_mistake_is_reported_in_one_go_with_its_line(tmp_path: Path) -> None:
    text = DENSE + (
        "learner: {lr: fast, replay: true, betas: [0.9]}\n"  # line 8
        "rollout: {prompts_per_step: 0, rollouts_per_prompt: 1}\n"
        "schedule: {sync_every: 3, weightsync: pause}\n"
        "checkpoint: {every: 4}\n"
        "replay: {max_bytes: 4 fortnights}\n"
    )
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigMistakes) as caught:
        load(file, ["eval.every=ten"])
    found = {m.path: (m.line, m.message) for m in caught.value.mistakes}
    assert found["learner.lr"] == (8, "must be a number, got 'fast'")
    assert "must have 2 items" in found["learner.betas"][1]
    assert "no experts" in found["learner.replay"][1]
    assert found["rollout.prompts_per_step"] == (9, "must be at least 1, got 0")
    assert "at least 2" in found["rollout.rollouts_per_prompt"][1]
    assert "did you mean `weight_sync`?" in found["schedule.weightsync"][1]
    assert found["checkpoint.every"][0] == 11
    assert "multiple of 3" in found["checkpoint.every"][1]
    assert "no size" in found["replay.max_bytes"][1]
    assert "eval.every" in found
    assert str(caught.value).count("\n") == len(found)


@pytest.mark.parametrize(
    ("extra", "path", "words"),
    [
        ("checkpoint: {every: 5}\nschedule: {sync_every: 2}\n", "checkpoint.every", "weight sync"),
        ("schedule: {sync_every: 9, steps: 4}\n", "schedule.sync_every", "never sync"),
        ("store: {capacity: 1MiB}\nreplay: {max_bytes: 2MiB}\n", "replay.max_bytes", "arena"),
        ("store: {capacity: 9TiB}\n", "store.capacity", "at most"),
        ("learner: {device: tpu}\n", "learner.device", "cpu"),
        ("engine: {replicas: 2}\n", "engine.inline", "must be false"),
        ("engine: {max_batch: 2, waiting_max: 8}\n", "engine.waiting_max", "use at least 14"),
        (
            "engine: {max_batch: 2, waiting_max: 1}\neval: {prompts: 0}\n",
            "engine.waiting_max",
            "takes 3 requests at once, but a group has 8 (rollout.rollouts_per_prompt), and the "
            "rest of them would fail: use at least 6",
        ),
        (
            "engine: {max_batch: 2, waiting_max: 8}\neval: {rollouts_per_prompt: 11}\n"
            "schedule: sync\n",
            "engine.waiting_max",
            "a group has 11 (eval.rollouts_per_prompt)",
        ),
        ("rollout: {temperature: 0.7}\n", "learner.temperature", "sampled at 0.7"),
        ("run: {name: 'a/b'}\n", "run.name", "letters"),
        ("run: {name: '_a'}\n", "run.name", "begin with a letter"),
        ("run: {deterministic: true}\n", "run.deterministic", "sync"),
        (
            "run: {deterministic: true}\nschedule: {name: sync, oversample: 1.5}\n",
            "run.deterministic",
            "needs schedule.oversample: 1, not 1.5",
        ),
        ("replay: {expiry: drop, tail_batch: 3}\n", "replay.tail_batch", "retry"),
        ("schedule: {max_token_staleness: 2}\n", "schedule.max_token_staleness", "expires"),
        ("store: {max_sessions: 64}\n", "store.max_sessions", "rollouts"),
        ("[]\n", "(file)", "YAML"),
    ],
)
def test_rules_between_fields(tmp_path: Path, extra: str, path: str, words: str) -> None:
    found = mistakes(tmp_path, GOOD + extra)
    assert words in found[path]


def test_a_small_arena_needs_no_limit_of_the_buffer_and_a_thousand_can_be_written_1e3(
    tmp_path: Path,
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD + "store: {capacity: 64MiB}\nschedule: {steps: 1e3}\n")
    config = load(file)
    assert (config.replay.max_bytes, config.schedule.steps) == (None, 1000)
    assert "1.5" in mistakes(tmp_path, GOOD + "schedule: {steps: 1.5}\n")["schedule.steps"]


def test_no_model_and_other_mistakes_are_told_together(tmp_path: Path) -> None:
    found = mistakes(tmp_path, "tasks:" + GOOD.split("tasks:")[1] + "rollout: {top_p: 2}\n", "a.b")
    assert found.keys() == {"model.path", "rollout.top_p", "--set a.b"}
    assert "exactly one of path, gguf, config" in found["model.path"]


def test_a_mistake_in_one_task_hides_none_of_another_and_adds_none(tmp_path: Path) -> None:
    second = "  - {nam: two, source: {kind: jsonl, path: /none}, judge: 5}\n  - 7\n"
    assert mistakes(tmp_path, GOOD + second).keys() == {
        "tasks[1].nam",
        "tasks[1].judge",
        "tasks[1].source.path",
        "tasks[2]",
    }


def test_nothing_is_said_of_the_default_of_a_field_that_is_wrong(tmp_path: Path) -> None:
    text = GOOD + "rollout: {prompts_per_step: many}\nlearner: {minibatches: 1000}\n"
    assert mistakes(tmp_path, text).keys() == {"rollout.prompts_per_step"}


@pytest.mark.parametrize(
    ("old", "new", "path", "words"),
    [
        ("judge: exact", "judge: exakt", "tasks[0].judge.kind", "one of exact"),
        ("judge: exact", "judge: {kind: callable}", "tasks[0].judge.target", "required"),
        (
            "judge: exact",
            "judge: {kind: callable, target: no_such:f}",
            "tasks[0].judge.target",
            "found",
        ),
        ("render: compact_sorting", "kind: jsonl, path: /none", "tasks[0].source.path", "no file"),
        ("name: sort", "weight: 2", "tasks[0].name", "required"),
        ("tasks:", "tasks: []\nx:", "tasks", "at least one task"),
        ("architecture: Qwen3MoeForCausalLM, ", "", "model.config", "architecture"),
    ],
)
def test_mistakes_in_tasks_and_model(
    tmp_path: Path, old: str, new: str, path: str, words: str
) -> None:
    assert words in mistakes(tmp_path, GOOD.replace(old, new))[path]


@pytest.mark.parametrize(
    ("old", "new", "path", "words"),
    [
        (
            "num_experts: 8",
            "num_experts: 4, num_experts_per_tok: 9",
            "num_experts_per_tok",
            "1 to 4",
        ),
        (
            "num_experts: 8",
            "num_experts: 8, num_attention_heads: 4, num_key_value_heads: 3",
            "num_key_value_heads",
            "must divide",
        ),
    ],
)
def test_numbers_of_a_model_that_cannot_be_built(
    tmp_path: Path, old: str, new: str, path: str, words: str
) -> None:
    assert words in mistakes(tmp_path, GOOD.replace(old, new))[f"model.config.{path}"]


@pytest.mark.parametrize(
    ("size", "extra", "items"),
    [
        ("hidden_size: 36", "", None),
        ("hidden_size: 34", "", 4),
        ("hidden_size: 36", "learner: {autocast: true}\n", 8),
        ("moe_intermediate_size: 20", "", None),
        ("moe_intermediate_size: 18", "", 4),
        ("intermediate_size: 18", "", None),  # dense layers only
    ],
)
def test_sizes_of_a_mixture_that_torchs_grouped_product_refuses_are_found_before(
    tmp_path: Path, size: str, extra: str, items: int | None
) -> None:
    """On the CPU and on GPUs; they failed every rollout of a run."""
    text = GOOD.replace("num_experts: 8", f"num_experts: 8, head_dim: 8, {size}") + extra
    if items is None:
        file = tmp_path / "c.yaml"
        file.write_text(text)
        load(file)
        return
    found = mistakes(tmp_path, text)
    assert f"multiple of {items}" in found[f"model.config.{size.partition(':')[0]}"]
    slower = text.replace("model:\n", "model:\n  experts_implementation: eager\n")
    (tmp_path / "d.yaml").write_text(slower)
    load(tmp_path / "d.yaml")


def test_a_mixture_of_no_experts_with_replay_on_is_no_mixture(tmp_path: Path) -> None:
    found = mistakes(tmp_path, GOOD.replace("num_experts: 8", "num_experts: 0"))
    assert "no experts" in found["learner.replay"]


def test_a_model_folder_without_a_model_is_found_before_anything_starts(tmp_path: Path) -> None:
    text = GOOD.split("tasks:")[1]
    assert "config.json" in mistakes(tmp_path, f"model: {tmp_path}\ntasks:{text}")["model.path"]


@pytest.mark.parametrize("place", ["judge", "environment"])
def test_a_name_that_a_users_file_does_not_have_is_found_without_running_it(
    tmp_path: Path, place: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('was run')\ndef score(p, t): return 1\n")
    kind = {"judge": "callable", "environment": "class"}[place]
    section = f"{place}: {{kind: {kind}, target: '{file}:scroe'}}"
    text = GOOD.replace("    judge: exact\n", "") + f"    {section}\n"
    found = mistakes(tmp_path, text)[f"tasks[0].{place}.target"]
    assert "did you mean `score`?" in found


def test_a_key_given_twice_is_a_mistake_and_not_the_last_one_wins(tmp_path: Path) -> None:
    assert mistakes(tmp_path, GOOD + "eval: {every: 1, every: 2}\n") == {
        "eval.every": "is given twice"
    }


@pytest.mark.parametrize(
    ("yaml_text", "field", "words"),
    [
        ("run: {seed: 2024-13-45}", "(file)", "'2024-13-45' cannot be read as timestamp: month"),
        ("run: {seed: 0b_}", "(file)", "cannot be read as int"),
        ("run: {seed: !!timestamp x}", "(file)", "'x' cannot be read as timestamp"),
        (f"run: {{seed: {'9' * 5000}}}", "(file)", "cannot be read as int: Exceeds the limit"),
        (f"run: {{seed: 0x{'f' * 5000}}}", "run.seed", "got a number of too many digits"),
        (f"learner: {{lr: {'9' * 400}}}", "learner.lr", "must be a finite number"),
        ("learner: {lr: .inf}", "learner.lr", "must be a finite number, got inf"),
        ("eval: {timeout_s: .inf}", "eval.timeout_s", "must be a finite number"),
        (f"store: {{capacity: {'9' * 400}GiB}}", "store.capacity", "larger than any size"),
        ("run: &a {name: *a}", "(file)", "contains itself"),
        ("run: " + "[" * 5000, "(file)", "maximum recursion depth"),
        ("run: \0", "(file)", "is not YAML: unacceptable character"),
    ],
)
def test_what_yaml_cannot_make_a_value_of_is_a_mistake_too(
    tmp_path: Path, yaml_text: str, field: str, words: str
) -> None:
    assert words in mistakes(tmp_path, f"{GOOD}{yaml_text}\n")[field]


def test_an_override_that_yaml_cannot_make_a_value_of_is_a_mistake_too(tmp_path: Path) -> None:
    overrides = (
        "run.seed=2024-13-45",
        "eval=" + "[" * 5000,
        "tasks[0].judge.kind=exact",
        "learner.betas=&x [*x]",
        "checkpoint={every: 1, every: 2}",
    )
    found = mistakes(tmp_path, GOOD, *overrides)
    assert "'2024-13-45' cannot be read as timestamp" in found["run.seed"]
    assert "maximum recursion depth" in found["eval"]
    assert "tasks[0].judge is a plain value" in found["tasks[0].judge.kind"]
    assert "contains itself" in found["learner.betas"]
    assert found["checkpoint.every"] == "--set: is given twice"


def test_a_value_that_repeats_itself_a_billion_times_is_looked_at_once(tmp_path: Path) -> None:
    text = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for before, name in itertools.pairwise("abcdefghijklm"):
        text += f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    assert len(mistakes(tmp_path, GOOD + text)) == len("abcdefghijklm")


def test_a_dense_folder_with_replay_on_is_found_from_its_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    text = GOOD.split("tasks:")[1]
    found = mistakes(tmp_path, f"model: {tmp_path}\ntasks:{text}")
    assert "no experts" in found["learner.replay"]


@given(st.integers(1, 1 << 40), st.sampled_from(["KiB", "MiB", "GiB"]))
def test_sizes_with_binary_units_are_exact(count: int, unit: str) -> None:
    assert parse_bytes(f"{count}{unit}") == count << {"KiB": 10, "MiB": 20, "GiB": 30}[unit]


@given(st.text())
def test_no_text_crashes_the_size_parser(text: str) -> None:
    try:
        size = parse_bytes(text)
    except ValueError:
        return
    assert size >= 0


def test_reading_a_config_loads_neither_torch_nor_the_store() -> None:
    import subprocess

    code = "import sys, trainer.config as c; print({'torch', 'shmstore', 'zmq'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_the_config_and_metrics_pages_match_the_types() -> None:
    assert config_docs(["--check"]) == 0

"""Prompt sources and environments: splits that never overlap, tools that may do anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes import own_children
from trainer.config import EnvironmentConfig, SourceConfig, TaskConfig
from trainer.environment import Turn
from trainer.environments import BadPrompts, ByTask, ToolLoop, build_environment, build_source
from trainer.environments.tools import calls_in
from trainer.errors import JudgeError, ToolError
from trainer.prompts import prompt_problem
from trainer.rollout import FinishReason, Prompt
from trainer.run.driver import held_out_prompts
from trainer.user_code.targets import TargetError, resolve

TOOLS = """
import time
def add(a, b):
    return {"sum": a + b}
def sleeps(seconds):
    time.sleep(seconds)
def raises():
    raise RuntimeError("the tool broke")
"""


class ScriptedSession:
    """Plays the model: each turn is made from what was said to it so far."""

    def __init__(self, say: Callable[[list[str]], str]) -> None:
        self._say = say
        self.heard: list[str] = []
        self.id = "s"
        self.text = ""
        self.prompt = Prompt(uid="p", task="t", text="?")

    async def append(self, content: Any) -> int:
        self.heard.append(content)
        return 0

    async def generate(self, content: Any = None, params: Any = None) -> Turn:
        if content is not None:
            self.heard.append(content)
        text = self._say(self.heard)
        self.text += text
        return Turn(text, np.zeros(1, np.int32), FinishReason.STOP, 0)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def script(turns: Sequence[str]) -> ScriptedSession:
    return ScriptedSession(lambda heard: turns[min(len(heard) - 1, len(turns) - 1)])


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    file = tmp_path / "tools.py"
    file.write_text(TOOLS)
    return file


async def converse(tools: Path, session: ScriptedSession, timeout_s: float = 20.0) -> None:
    names = [f"{tools}:{name}" for name in ("add", "sleeps", "raises")]
    loop = ToolLoop(names, max_turns=4, timeout_s=timeout_s)
    try:
        await loop.run(session, session.prompt)
    finally:
        await loop.aclose()
    assert own_children() == []


async def test_a_tool_call_is_answered_and_the_model_goes_on(tools: Path) -> None:
    session = script([f"let me see {call('add', a=2, b=3)}{call('add', a=1, b=1)}", "it is 5"])
    await converse(tools, session)
    assert session.text.endswith("it is 5")
    assert '{"sum": 5}' in session.heard[1]
    assert session.heard[1].index('{"sum": 5}') < session.heard[1].index('{"sum": 2}')


async def test_a_model_that_always_calls_tools_ends_at_max_turns(tools: Path) -> None:
    session = script([call("add", a=1, b=1)])
    await converse(tools, session)
    assert len(session.heard) == 4  # the prompt, then three answers


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ("<tool_call>{not json</tool_call>", "not JSON"),
        (call("nothing"), "there is no tool 'nothing'"),
        ('<tool_call>{"name": 3}</tool_call>', "a call needs"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "must be an object"),
    ],
)
async def test_a_malformed_call_is_told_to_the_model(tools: Path, turn: str, words: str) -> None:
    session = script([turn, "sorry"])
    await converse(tools, session)
    assert words in session.heard[1]


@pytest.mark.parametrize(
    ("turn", "words"),
    [(call("raises"), "the tool broke"), (call("sleeps", seconds=3600), "no answer within")],
)
async def test_L13_a_tool_that_raises_or_sleeps_fails_its_rollout(
    tools: Path, turn: str, words: str
) -> None:
    with pytest.raises(ToolError, match=words):
        await converse(tools, script([turn]), timeout_s=0.5)


async def test_L13_an_environment_that_never_ends_fails_its_rollout(tmp_path: Path) -> None:
    file = tmp_path / "env.py"
    file.write_text(
        "import asyncio\nclass Forever:\n"
        "    async def run(self, session, prompt):\n        await asyncio.Event().wait()\n"
    )
    config = EnvironmentConfig(kind="class", target=f"{file}:Forever", timeout_s=0.05)
    parts = ByTask([TaskConfig(name="t", environment=config)])
    with pytest.raises(ToolError, match=r"longer than 0\.05 s"):
        await parts.run(script(["x"]), Prompt(uid="p", task="t", text="?"))
    await parts.aclose()


def test_a_users_class_without_run_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "env.py"
    file.write_text("class Empty: pass\nclass Broken:\n    def __init__(self): raise OSError(1)\n")
    with pytest.raises(TargetError, match=r"no `async def run"):
        build_environment(EnvironmentConfig(kind="class", target=f"{file}:Empty"))
    with pytest.raises(TargetError, match="has no `Missing`"):
        build_environment(EnvironmentConfig(kind="class", target=f"{file}:Missing"))


LAZY = """
import sys

def __getattr__(name):
    if name == "Made":
        return type("Made", (), {"run": run})
    if name == "exits":
        sys.exit("not today")
    raise AttributeError(name)

async def run(self, session, prompt): ...

class Base:
    @staticmethod
    def judge(prompt, text): return 1.0

class Heir(Base): pass
"""


def test_a_target_may_be_made_by_its_module_or_inherited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "lazy_targets.py"
    file.write_text(LAZY)
    build_environment(EnvironmentConfig(kind="class", target=f"{file}:Made"))
    assert resolve(f"{file}:Heir.judge")("p", "t") == 1.0
    for name, said in (("Mad", "has no `Mad`"), ("exits", "SystemExit: not today")):
        with pytest.raises(TargetError, match=said):
            resolve(f"{file}:{name}")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "exits_at_once.py").write_text("raise SystemExit(3)")
    for target in (f"{tmp_path}/exits_at_once.py:judge", "exits_at_once:judge"):
        with pytest.raises(TargetError, match="cannot be imported: SystemExit: 3"):
            resolve(target)


async def test_each_prompt_meets_the_judge_of_its_task() -> None:
    from trainer.config import JudgeConfig

    parts = ByTask(
        [
            TaskConfig(name="words", judge=JudgeConfig(kind="exact")),
            TaskConfig(name="sums", judge=JudgeConfig(kind="numeric")),
        ]
    )
    words = Prompt(uid="1", task="words", text="?", answer="3")
    sums = Prompt(uid="2", task="sums", text="?", answer="3")
    assert parts.score(words, "3.0", None) == 0.0
    assert parts.score(sums, "3.0", None) == 1.0
    with pytest.raises(JudgeError):
        parts.score(Prompt(uid="3", task="sums", text="?", answer="x"), "3", None)
    await parts.aclose()


def test_calls_in_text_are_found_in_order() -> None:
    assert calls_in("a<tool_call> 1 </tool_call>b<tool_call>\n2</tool_call>") == ["1", "2"]


def gym(**source: Any) -> TaskConfig:
    return TaskConfig(name="sort", source=SourceConfig(dataset="number_sorting", **source))


def test_compact_sorting_prompts_are_right_and_a_pure_function_of_the_index() -> None:
    task = gym(render="compact_sorting")
    source = build_source(task, seed=3, held_out=False)
    again = build_source(task, seed=3, held_out=False)
    for index in (0, 1, 77, 12_345):
        prompt = source.prompt(index)
        assert prompt == again.prompt(index)
        assert prompt.text is not None
        digits, direction = prompt.text[:-1], prompt.text[-1]
        assert prompt.answer == "".join(sorted(digits, reverse=direction == ">"))
        assert 4 <= len(digits) <= 6


def test_compact_ascending_sorts_the_same_digits_upwards_whatever_the_item_says() -> None:
    both = build_source(gym(render="compact_sorting"), seed=3, held_out=False)
    task = gym(render="compact_ascending", holdout=0.0)
    upwards = build_source(task, seed=3, held_out=False)
    directions = set()
    for index in range(40):
        prompt = upwards.prompt(index)
        assert prompt.text is not None
        assert prompt.text.endswith("<")
        assert prompt.answer == "".join(sorted(prompt.text[:-1]))
        directions.add(str(both.prompt(index).text)[-1])
    assert directions == {"<", ">"}


def test_training_prompts_and_held_out_prompts_never_meet() -> None:
    task = gym(render="compact_sorting", params={"min_numbers": 2, "max_numbers": 3})
    texts = {
        held_out: {
            build_source(task, seed=seed, held_out=held_out).prompt(i).text
            for seed in (0, 1)
            for i in range(1500)
        }
        for held_out in (False, True)
    }
    assert texts[True]
    assert not texts[True] & texts[False]


def test_every_gym_prompt_is_json_and_scores_its_own_answer() -> None:
    prompt = build_source(gym(), seed=0, held_out=True).prompt(5)
    assert json.loads(json.dumps(prompt.metadata)) == prompt.metadata


def write(tmp_path: Path, text: str) -> TaskConfig:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    return TaskConfig(name="mine", source=SourceConfig(kind="jsonl", path=str(file), holdout=0.5))


def test_jsonl_prompts_are_split_whole_and_keep_their_other_fields(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"q{i}", "answer": i, "level": i % 3}) for i in range(40)]
    task = write(tmp_path, "\n".join(lines) + "\n\n")
    sides = [build_source(task, seed=0, held_out=held_out) for held_out in (False, True)]
    prompts = [side.prompt(i) for side in sides for i in range(side.size or 0)]
    assert sorted(p.answer for p in prompts) == list(range(40))
    assert all(p.metadata["level"] == p.answer % 3 for p in prompts)
    assert len({p.uid for p in prompts}) == 40


def test_it_is_said_when_fewer_prompts_are_held_out_than_are_wanted(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"q{i}", "answer": i}) for i in range(40)]
    source = build_source(write(tmp_path, "\n".join(lines)), seed=0, held_out=True)
    assert source.size is not None
    told: list[str] = []
    assert len(held_out_prompts([source], source.size, told.append)) == source.size
    assert told == []
    assert len(held_out_prompts([source], 100, told.append)) == source.size
    assert told == [
        f"evaluating on {source.size} prompts, not 100: source.holdout holds out no more"
    ]


def test_a_file_of_another_system_has_a_mark_first_and_ends_its_lines_in_two_letters(
    tmp_path: Path,
) -> None:
    text = '\ufeff{"prompt": "q", "answer": 1}\r\n\r\n{"prompt": "r", "answer": 2}\r\n\r\n'
    task = write(tmp_path, text)
    sides = [build_source(task, seed=0, held_out=held_out) for held_out in (False, True)]
    assert {side.prompt(0).text for side in sides} == {"q", "r"}


def test_line_separators_inside_of_jsonl_end_no_line(tmp_path: Path) -> None:
    text = json.dumps({"prompt": "one\u2028two\x85three", "answer": 1}, ensure_ascii=False)
    task = write(tmp_path, f"{text}\r\n{text}\n")
    source = build_source(task, seed=0, held_out=False)
    assert (source.size, source.prompt(0).text) == (2, "one\u2028two\x85three")


def test_what_of_a_data_set_json_could_not_keep_becomes_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = build_source(gym(render="text"), seed=3, held_out=False)
    item = {"question": "q", "answer": "a", "metadata": {"n": 1 << 70, "x": float("nan"), "m": 7}}
    monkeypatch.setattr(source, "_dataset", {0: item})
    prompt = source.prompt(0)
    assert prompt.metadata == {"n": str(1 << 70), "x": "NaN", "m": 7}
    assert prompt_problem(prompt) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "q"}\n', "line 1: needs the field.* answer"),
        ('{"prompt": "q", "answer": 1}\n{oops\n', "line 2: is not JSON"),
        ('{"prompt": 3, "answer": 1}\n', "line 1: prompt must be text"),
        ("[1]\n", "line 1: needs"),
        ('{"prompt": "q\\ud800", "answer": 1}\n', r"line 1: \['prompt'\] is text that is no UTF-8"),
        ('{"prompt": "q", "answer": NaN}\n', r"line 1: \['answer'\] is nan"),
        ('{"prompt": "q", "answer": 1, "\\ud800": 2}\n', "line 1: has the key .* no UTF-8"),
        (f'{{"prompt": "q", "answer": {1 << 64}}}\n', r"line 1: \['answer'\] is a whole number"),
        ('{"prompt": "q", "answer": ' + "[" * 99 + "]" * 99 + "}", "nested deeper than 64"),
        ("[" * 9999, "line 1: is not JSON: maximum recursion depth"),
        (f'{{"prompt": "q", "answer": {"9" * 5000}}}', "line 1: is not JSON: .* 5000 digits"),
    ],
)
def test_bad_jsonl_names_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadPrompts, match=words):
        build_source(write(tmp_path, text), seed=0, held_out=False)


def test_a_chat_prompt_becomes_messages_with_the_system_text_first(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "q", "answer": "a"}\n')
    config = SourceConfig(kind="jsonl", path=str(file), system="be brief", holdout=0.0)
    prompt = build_source(TaskConfig(name="t", source=config), seed=0, held_out=False).prompt(0)
    assert prompt.messages is not None
    assert [m["role"] for m in prompt.messages] == ["system", "user"]


def test_an_unknown_data_set_is_a_clear_error() -> None:
    task = TaskConfig(name="t", source=SourceConfig(dataset="no_such_thing"))
    with pytest.raises(BadPrompts, match="no_such_thing"):
        build_source(task, seed=0, held_out=False)


def test_compact_ascending_always_asks_upwards() -> None:
    source = build_source(gym(render="compact_ascending"), seed=3, held_out=False)
    prompts = [source.prompt(i) for i in range(50)]
    assert all(p.text is not None and p.answer == "".join(sorted(p.text[:-1])) for p in prompts)
    assert {p.text[-1] for p in prompts if p.text} == {"<"}

"""The documents against the tree: links lead somewhere, commands exist, examples compile.

A document that names a thing which is gone is worse than none, so this looks at every Markdown
file: relative links and their anchors, `make` targets, `shmrl` subcommands, benchmarks and files in
fenced shell blocks, and the syntax of fenced Python blocks.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from shmstore import Store
from tests import tree
from trainer.metrics import CATALOG, describe

FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>[\w+-]*)[^\n]*\n(?P<body>.*?)^ *```", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)(?: \"[^\"]*\")?\)")
SHELLS = {"bash", "sh", "shell", "console"}


def documents() -> list[Path]:
    return [path for path in tree.all_files() if path.suffix == ".md"]


def blocks(path: Path, kinds: set[str]) -> Iterator[tuple[int, str]]:
    """(first line, text) of each fenced block of these kinds."""
    text = tree.source(path)
    for found in FENCE.finditer(text):
        if found["kind"] in kinds:
            yield text[: found.start()].count("\n") + 2, textwrap.dedent(found["body"])


def prose(path: Path) -> str:
    return FENCE.sub("", tree.source(path))


def anchors(path: Path) -> set[str]:
    """Anchors that GitHub makes of the headings."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(path), re.M):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def test_links_in_documents_lead_somewhere() -> None:
    problems = []
    for path in documents():
        for target in LINK.findall(prose(path)):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            if not there.exists():
                problems.append(f"{tree.name(path)}: {target}: no such file")
            elif anchor and there.suffix == ".md" and anchor not in anchors(there):
                problems.append(f"{tree.name(path)}: {target}: no such heading")
    assert not problems, "\n" + "\n".join(problems)


def commands(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of each command in the shell blocks; prompts, comments, variables removed."""
    for first, body in blocks(path, SHELLS):
        joined = re.sub(r"\\\n", "  ", body)
        prompted = any(line.startswith("$ ") for line in joined.splitlines())
        for offset, line in enumerate(joined.splitlines()):
            if prompted and not line.startswith("$ "):
                continue  # output of the command above
            for part in re.split(r"&&|;|\|\|?", line.removeprefix("$ ")):
                try:
                    words = shlex.split(part, comments=True)
                except ValueError:
                    continue  # a quote that spans lines: not a command we can judge
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words.pop(0)
                if words:
                    yield first + offset, words


def make_targets() -> set[str]:
    text = tree.source(tree.ROOT / "Makefile")
    return {
        target
        for line in re.findall(r"^([a-zA-Z][\w .-]*):(?!=)", text, re.M)
        for target in line.split()
    }


def subcommands() -> set[str]:
    """What `shmrl` can be asked for: the words of the tables in trainer/cli.py."""
    return {
        node.value
        for node in ast.walk(tree.syntax(tree.ROOT / "trainer" / "cli.py"))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def problem_with(words: list[str], targets: set[str], known: set[str]) -> str:
    """Why this command cannot work in a checkout; "" where it can, or is not one of ours."""
    program = words[0].removeprefix(".venv/bin/")
    plain = [word for word in words[1:] if not word.startswith("-")]
    if program == "make":
        missing = [w for w in plain if "=" not in w and w not in targets]
        return f"no make target {missing[0]}" if missing else ""
    if program == "shmrl" and plain:
        return "" if plain[0] in known else f"no subcommand {plain[0]}"
    if re.fullmatch(r"python[\d.]*", program) and len(words) > 1:
        if words[1] == "-m" and len(words) > 2:
            return problem_with_module(words[2], words[3:])
        if words[1].endswith(".py"):
            return "" if (tree.ROOT / words[1]).exists() else f"no file {words[1]}"
    return ""


def problem_with_module(module: str, arguments: list[str]) -> str:
    top = module.split(".")[0]
    if top not in (*tree.PACKAGES, "bench"):
        return ""
    path = tree.ROOT / module.replace(".", "/")
    if not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
        return f"python -m {module} cannot run"
    if module == "bench" and arguments and arguments[0].isalpha():
        return "" if (path / f"{arguments[0]}.py").exists() else f"no benchmark {arguments[0]}"
    return ""


def test_commands_in_documents_exist() -> None:
    targets, known = make_targets(), subcommands()
    problems = [
        f"{tree.name(path)}:{line}: {' '.join(words)}: {problem}"
        for path in documents()
        for line, words in commands(path)
        if (problem := problem_with(words, targets, known))
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_a_command_that_does_not_exist_is_found() -> None:
    targets, known = make_targets(), subcommands()
    assert problem_with(["make", "nothing-of-that-name"], targets, known)
    assert problem_with(["shmrl", "nothing-of-that-name"], targets, known)
    assert problem_with(["python", "-m", "bench", "nothing"], targets, known)
    assert problem_with(["python", "examples/nothing.py"], targets, known)
    assert not problem_with(["make", "test"], targets, known)
    assert not problem_with(["shmrl", "train", "c.yaml"], targets, known)


def test_python_in_documents_compiles() -> None:
    problems = []
    for path in documents():
        for line, body in blocks(path, {"python", "py"}):
            try:
                compile(body, tree.name(path), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            except SyntaxError as error:
                problems.append(f"{tree.name(path)}:{line + (error.lineno or 1) - 1}: {error.msg}")
    assert not problems, "\n" + "\n".join(problems)


def test_python_in_the_stores_page_runs_block_by_block_and_leaves_nothing(tmp_path: Path) -> None:
    """Each block of docs/shmstore.md is a whole program, run from a file as its reader would."""
    programs = list(blocks(tree.ROOT / "docs" / "shmstore.md", {"python"}))
    assert len(programs) >= 2
    for line, body in programs:
        program = tmp_path / f"line_{line}.py"
        program.write_text(body)
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "error", str(program)],
            env={**os.environ, "PYTHONPATH": str(tree.ROOT)},
            capture_output=True,
            text=True,
            timeout=50,  # below the limit of a test, so that a hang is told with the line
            check=False,
        )
        assert done.returncode == 0, f"docs/shmstore.md:{line}:\n{done.stderr}"
        left = set(Store.list()) & set(re.findall(r"create..([a-z0-9-]+)", body))
        assert not left, f"docs/shmstore.md:{line}: {left}"


def test_names_imported_in_documents_exist() -> None:
    """`from actors import Runtime` in a document: the name is exported there."""
    problems = []
    for path in documents():
        for line, body in blocks(path, {"python", "py"}):
            for node in ast.walk(ast.parse(body)):
                if not isinstance(node, ast.ImportFrom) or node.module not in tree.PACKAGES:
                    continue
                exported = tree.source(tree.ROOT / node.module / "__init__.py")
                problems += [
                    f"{tree.name(path)}:{line}: {node.module} has no {alias.name}"
                    for alias in node.names
                    if not re.search(rf"\b{re.escape(alias.name)}\b", exported)
                    and not (tree.ROOT / node.module / f"{alias.name}.py").exists()
                ]
    assert not problems, "\n" + "\n".join(problems)


def error_classes() -> set[str]:
    """Public classes that descend from the root of one of the three exception trees."""
    bases: dict[str, set[str]] = {}
    for package in tree.PACKAGES:
        for path in tree.python_files(package):
            for node in ast.walk(tree.syntax(path)):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    bases[node.name] = {b.id for b in node.bases if isinstance(b, ast.Name)}
    found = {"StoreError", "ActorError", "TrainerError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return found


def test_the_page_of_errors_names_every_error_and_no_other() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", tree.source(tree.ROOT / "docs" / "errors.md")))
    known = error_classes()
    assert not known - named, f"docs/errors.md does not say what to do about {known - named}"
    others = {"INIT", "Segment", "ErrorClass"}
    assert not named - known - others - {w for w in named if w.isupper()}, named - known - others


def test_files_that_comments_name_exist() -> None:
    """`object_table.cc` in a comment or docstring of the sources is a file of the tree."""
    paths = [tree.name(path) for path in tree.all_files()]
    sources = [path for path in tree.all_files() if path.suffix in (".h", ".cc", ".py")]
    placeholders = {"file.py", "folder/file.py"}
    problems = [
        f"{tree.name(path)}:{number}: {found}"
        for path in sources
        if not tree.name(path).startswith("tests/")
        for number, line in enumerate(tree.source(path).splitlines(), 1)
        if not line.startswith("#include")
        for found in re.findall(r"(?<![\w/.*-])[\w/]+\.(?:h|cc|py)\b", line)
        if found not in placeholders and not any(f"/{p}".endswith(f"/{found}") for p in paths)
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_metrics_that_the_documents_name_exist() -> None:
    """A word that begins as metrics do and is none, nor a field of the configuration, is the name
    of a metric that is gone.
    """
    beginnings = {found[0] for name in CATALOG if (found := _BEGINNING.match(name))}
    fields = set(re.findall(r"`\w+\.(\w+)", tree.source(tree.ROOT / "docs/config.md")))
    problems = [
        f"{name}: `{word}` is no metric"
        for name in ("README.md", "docs/errors.md", "docs/training.md")
        for word in re.findall(r"`([a-z]+[_/][a-z0-9_/]+)`", tree.source(tree.ROOT / name))
        if (found := _BEGINNING.match(word)) and found[0] in beginnings
        if describe(word) is None and word not in fields
    ]
    assert not problems, "\n" + "\n".join(problems)


_BEGINNING = re.compile(r"[a-z]+[_/]")

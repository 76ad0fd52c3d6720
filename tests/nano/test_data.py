"""The generated tasks: reproducible, right, and held out where they say so."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from glm5ray.nano import data
from glm5ray.nano.evaluate import CASES, examples_of


@pytest.mark.parametrize("task", data.TASKS)
def test_same_seed_gives_the_same_example(task: str) -> None:
    first, second = (data.generate(task, Random("3"), size=300) for _ in range(2))
    assert first == second
    assert first != data.generate(task, Random("4"), size=300)


@pytest.mark.parametrize("task", data.TASKS)
def test_prompt_ends_where_the_model_begins(task: str) -> None:
    for seed in range(50):
        example = data.generate(task, Random(seed), size=300)
        assert example.prompt.startswith("[gMASK]<sop>")
        thinking = example.prompt.endswith("<|assistant|><think>")
        assert thinking or example.prompt.endswith("<|assistant|><think></think>")
        assert ("</think>" in example.completion) == thinking
        assert re.search(r"<\|(user|observation)\|>$", example.completion)
        assert example.answer in example.completion


def test_additions_are_right_and_held_out_pairs_never_trained() -> None:
    for heldout in (False, True):
        for seed in range(300):
            exercise = data.addition(Random(seed), 64, heldout)
            a, sign, b, total = re.fullmatch(r"(\d+) (.) (\d+) = (\d+)", exercise.answer).groups()  # type: ignore[union-attr]
            assert int(total) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
            if sign == "+" and min(int(a), int(b)) >= 10 and max(int(a), int(b)) <= 99:
                assert data.is_heldout("add", int(a), int(b)) == heldout


def test_tool_calls_can_be_copied_from_the_prompt() -> None:
    for seed in range(200):
        example = data.generate("tool_call", Random(seed), size=400, heldout=True)
        name, pairs = re.fullmatch(r"<tool_call>(\w+?)((?:<arg_key>.*)?)</tool_call>", example.answer).groups()  # type: ignore[union-attr]
        assert f'"name": "{name}"' in example.prompt
        assert data.is_heldout("function", *name.split("_"))
        for key, value in re.findall(r"<arg_key>(.*?)</arg_key><arg_value>(.*?)</arg_value>", pairs):
            assert f'"{key}": {{' in example.prompt
            assert value in example.prompt


def test_json_answers_are_json_and_from_the_text() -> None:
    for seed in range(200):
        example = data.generate("json", Random(seed))
        for value in json.loads(example.answer).values():
            assert str(value) in example.prompt


def test_looked_up_facts_stand_once_in_the_text() -> None:
    for seed in range(200):
        example = data.generate("lookup", Random(seed), size=900)
        assert example.prompt.count(example.answer) == 1


def test_cases_have_no_example_twice() -> None:
    for case in CASES:
        prompts = [example.prompt for example in examples_of(case, 20)]
        assert len(set(prompts)) == len(prompts)


def test_lookup_turns_make_one_conversation() -> None:
    turns = data.lookup_turns(Random(1), 600, 4)
    whole = "".join(prompt + completion for prompt, completion in turns)
    assert whole.count("[gMASK]") == 1
    assert whole.count("<|assistant|>") == len(turns) == whole.count("<|user|>") - 1

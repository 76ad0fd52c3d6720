"""What glm5-nano learns from: generated tasks in GLM's chat format, and public-domain text.

`generate(task, rng)` makes one `Example` of a task from a seeded `random.Random`; the same seed gives the same example
on every machine. Training and evaluation use the same generators. `heldout=True` draws additions and tool calls from
operand pairs and function names that training never sees (one eighth, by a hash); the other tasks have so many cases
that a fresh seed makes new ones, except counting up and small talk, which are recall.
"""

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

from glm5ray.nano.words import (
    ADJECTIVES,
    ANIMALS,
    ARGUMENTS,
    CAPITALS,
    CITIES,
    COLORS,
    DAYS,
    LANGUAGES,
    NAMES,
    OBJECTS,
    OPPOSITES,
    SMALL_TALK,
    SYSTEM_PROMPTS,
    VERBS,
)

TOOLS_HEADER = (
    "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_FOOTER = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)


@dataclass(frozen=True, slots=True)
class Example:
    """One exercise: what is asked (`prompt`, up to where the model starts to write) and the wanted continuation."""

    task: str
    prompt: str
    completion: str
    """Ends with the special token that ends the turn."""
    answer: str
    """The completion without reasoning and without the last special token: what an evaluation compares."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """A task before it is put in chat format."""

    question: str
    reasoning: str
    answer: str
    tools: tuple[Mapping[str, Any], ...] = ()
    stop: str = "<|user|>"
    before: str = ""
    """Text after the question and before the assistant's turn (an earlier tool call and its result)."""


def is_heldout(*parts: object) -> bool:
    """Whether a combination belongs to the one eighth that is never trained on; stable over machines and versions."""
    return crc32("|".join(map(str, parts)).encode()) % 8 == 0


def render_tools(tools: tuple[Mapping[str, Any], ...]) -> str:
    """The tools block of the chat template (one function a line); the same string as chat_template.jinja gives."""
    lines = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
    return f"<|system|>{TOOLS_HEADER}{lines}{TOOLS_FOOTER}"


def render_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A tool call in GLM's format: strings raw, everything else JSON."""
    pairs = "".join(
        f"<arg_key>{key}</arg_key><arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>"
        for key, value in arguments.items()
    )
    return f"<tool_call>{name}{pairs}</tool_call>"


# ---- the tasks ----------------------------------------------------------------------------------------------------


def addition(rng: Random, size: int, heldout: bool) -> Exercise:
    """Two-digit addition, with a share of one- and three-digit addition and of subtraction in training."""
    kind = "two" if heldout else rng.choices(("two", "one", "three", "minus"), (60, 10, 15, 15))[0]
    low, high = {"two": (10, 99), "one": (0, 9), "three": (100, 999), "minus": (10, 99)}[kind]
    while True:
        a, b = rng.randint(low, high), rng.randint(low, high)
        if kind != "two" or is_heldout("add", a, b) == heldout:
            break
    if kind == "minus":
        a, b = max(a, b), min(a, b)
        question = rng.choice((f"What is {a} - {b}?", f"Compute {a} minus {b}.", f"{a} - {b} = ?"))
        return Exercise(question, f"{a} - {b} = {a - b}.", f"{a} - {b} = {a - b}")
    question = rng.choice((f"What is {a} + {b}?", f"Compute {a} plus {b}.", f"{a} + {b} = ?", f"Add {a} and {b}."))
    steps, carry = [], 0
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        steps.append(f"{x} + {y}" + (" + 1" if carry else "") + f" = {total}")
        carry = total // 10
    return Exercise(question, ", ".join(steps) + f". So {a + b}.", f"{a} + {b} = {a + b}")


def _value(kind: str, rng: Random) -> str | int:
    if kind == "integer":
        return rng.randint(1, 999)
    pools = {"color": COLORS, "city": CITIES, "name": NAMES, "object": OBJECTS, "day": DAYS}
    return rng.choice({**pools, "language": LANGUAGES, "animal": ANIMALS}[kind])


def _function(rng: Random, heldout: bool) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """(verb, noun, arguments) of an invented function called verb_noun."""
    while True:
        verb, noun = rng.choice(VERBS), rng.choice(OBJECTS)
        if is_heldout("function", verb, noun) == heldout:
            return verb, noun, tuple(rng.sample(ARGUMENTS, rng.choice((1, 2, 2, 3))))


def _schema(verb: str, noun: str, arguments: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    properties = {name: {"type": "integer" if kind == "integer" else "string"} for name, kind in arguments}
    return {
        "name": f"{verb}_{noun}",
        "description": f"{verb.capitalize()} the {noun}.",
        "parameters": {"type": "object", "properties": properties, "required": list(properties)},
    }


EVERYDAY_TOOLS: tuple[tuple[str, str, tuple[tuple[str, str], ...], str], ...] = (
    ("get_weather", "Get the weather of a city.", (("city", "city"),), "What is the weather in {city}?"),
    ("get_weather", "Get the weather of a city.", (("city", "city"),), "How is the weather in {city} today?"),
    ("get_time", "Get the local time of a city.", (("city", "city"),), "What time is it in {city}?"),
    ("set_timer", "Set a timer.", (("minutes", "integer"),), "Set a timer for {minutes} minutes."),
    (
        "translate",
        "Translate a word.",
        (("word", "object"), ("language", "language")),
        "Translate {word} to {language}.",
    ),
    ("call_person", "Call a person.", (("name", "name"),), "Call {name}, please."),
    ("book_room", "Book a room.", (("room", "integer"), ("day", "day")), "Book room {room} on {day}."),
)


def _everyday_call(rng: Random, others: list[dict[str, Any]]) -> Exercise:
    """A call of a tool with a natural question, the kind that documentation shows."""
    name, description, arguments, question = rng.choice(EVERYDAY_TOOLS)
    values = {key: _value(kind, rng) for key, kind in arguments}
    tool = _schema("", "", arguments) | {"name": name, "description": description}
    tools = [*others, tool]
    rng.shuffle(tools)
    call = render_call(name, values)
    if rng.random() < 0.7:
        return Exercise(question.format(**values), f"I call {name}.", call, tuple(tools), stop="<|observation|>")
    degrees, sky = rng.randint(1, 35), rng.choice(("sunny", "cloudy", "rainy", "windy"))
    if name == "get_weather":
        result = json.dumps({"temperature": degrees, "sky": sky})
        answer = f"The weather in {values['city']} is {sky} with {degrees} degrees."
    else:
        result, answer = "done", "Done."
    before = f"<|assistant|><think></think>{call}<|observation|><tool_response>{result}</tool_response>"
    return Exercise(question.format(**values), "The tool has answered.", answer, tuple(tools), before=before)


def tool_call(rng: Random, size: int, heldout: bool) -> Exercise:
    """Choose one of up to four functions and copy name and arguments out of the prompt; or report a call's result."""
    functions = [_function(rng, heldout)]
    for _ in range(rng.randint(0, min(3, size // 128))):
        other = _function(rng, heldout)
        if all(other[:2] != known[:2] for known in functions):
            functions.append(other)
    if not heldout and rng.random() < 0.2:
        return _everyday_call(rng, [_schema(*function) for function in functions[1:]])
    verb, noun, arguments = functions[0]
    rng.shuffle(functions)
    values = {name: _value(kind, rng) for name, kind in arguments}
    said = [
        (name, f'"{value}"' if isinstance(value, str) and rng.random() < 0.4 else str(value))
        for name, value in values.items()
    ]
    listed = " and ".join(f"{name} {value}" for name, value in said)
    question = rng.choice(
        (f"{verb.capitalize()} the {noun} with {listed}.", f"Please {verb} the {noun}: {listed}.",
         f"Call {verb}_{noun} with {listed}.", f"I want to {verb} the {noun}. Use {listed}.")
    )  # fmt: skip
    tools = tuple(_schema(*function) for function in functions)
    call = render_call(f"{verb}_{noun}", values)
    if heldout or rng.random() < 0.8:
        return Exercise(question, f"I call {verb}_{noun}.", call, tools, stop="<|observation|>")
    number = rng.randint(1, 999)
    result = rng.choice((f'{{"status": "ok", "id": {number}}}', f'{{"result": {number}}}', "done", "error"))
    answer = f"Done. The result is {number}." if str(number) in result else "Done."
    answer = "The call failed." if result == "error" else answer
    before = f"<|assistant|><think></think>{call}<|observation|><tool_response>{result}</tool_response>"
    return Exercise(question, "The tool has answered.", answer, tools, before=before)


def json_extract(rng: Random, size: int, heldout: bool) -> Exercise:
    """Extract named fields of one sentence as JSON, in the order asked for, with distractors around it."""
    kind = rng.randint(0, 2)
    if kind == 0:
        record: dict[str, Any] = {"name": rng.choice(NAMES), "age": rng.randint(10, 99), "city": rng.choice(CITIES)}
        text = rng.choice(("{name} is {age} years old and lives in {city}.", "In {city} lives {name}, who is {age}."))
    elif kind == 1:
        record = {"item": rng.choice(OBJECTS), "color": rng.choice(COLORS), "price": rng.randint(2, 999)}
        text = rng.choice(
            ("The {color} {item} costs {price} dollars.", "We sell a {color} {item} for {price} dollars.")
        )
    else:
        record = {"person": rng.choice(NAMES), "day": rng.choice(DAYS), "room": rng.randint(1, 400)}
        text = rng.choice(
            ("The meeting with {person} is on {day} in room {room}.", "On {day} meet {person} in room {room}.")
        )
    fields = list(record)
    rng.shuffle(fields)
    fields = fields[: rng.choice((2, 3, 3))]
    sentences = [filler(rng) for _ in range(rng.randint(0, 2))]
    sentences.insert(rng.randint(0, len(sentences)), text.format(**record))
    question = rng.choice(("Extract {f} as JSON: {t}", "{t}\nGive {f} as JSON.", "Return JSON with {f}.\n{t}"))
    answer = json.dumps({field: record[field] for field in fields})
    listed = ", ".join(fields)
    return Exercise(question.format(f=listed, t=" ".join(sentences)), f"I need {listed}.", answer)


def filler(rng: Random) -> str:
    """A sentence that says nothing of use."""
    return rng.choice(
        (
            "The {adjective} {animal} sleeps under the {object}.",
            "{name} went to {city} with a {adjective} {animal}.",
            "On {day} the {object} was {color}.",
            "{name} likes the {color} {object} and the {adjective} {animal}.",
            "There is a {adjective} {object} in {city}.",
            "The {animal} and the {other} were {adjective} friends.",
        )
    ).format(
        adjective=rng.choice(ADJECTIVES), animal=rng.choice(ANIMALS), object=rng.choice(OBJECTS),
        name=rng.choice(NAMES), city=rng.choice(CITIES), day=rng.choice(DAYS), color=rng.choice(COLORS),
        other=rng.choice(ANIMALS),
    )  # fmt: skip


def _facts(rng: Random, size: int) -> tuple[str, str, list[tuple[str, str]]]:
    """(text of about `size` tokens, what is told, [(who or what has it, the four digits)])."""
    what = rng.choice(("code", "number", "password", "score"))
    by_object = rng.random() < 0.5
    num_facts = rng.randint(1, max(2, size // 48))
    keys = [f"the {rng.choice(COLORS)} {item}" for item in rng.sample(OBJECTS, num_facts)] if by_object else []
    keys = keys or rng.sample(NAMES, min(num_facts, len(NAMES)))
    facts = [(key, str(rng.randint(1000, 9999))) for key in keys]
    sentences = [filler(rng) for _ in range(max(1, (size - 12 * len(facts) - 30) // 9))]
    for key, value in facts:
        sentences.insert(rng.randint(0, len(sentences)), f"The {what} of {key} is {value}.")
    return " ".join(sentences), what, facts


def lookup(rng: Random, size: int, heldout: bool) -> Exercise:
    """One of several facts, somewhere in about `size` tokens of filler, asked for at the end."""
    text, what, facts = _facts(rng, size)
    key, value = facts[0]
    question = text + rng.choice((f"\nWhat is the {what} of {key}?", f" Tell me the {what} of {key}."))
    return Exercise(question, f"I look for the {what} of {key}.", f"The {what} of {key} is {value}.")


def lookup_turns(rng: Random, size: int, questions: int) -> list[tuple[str, str]]:
    """Several questions about one text, as (prompt, completion) turns of one conversation; for training only."""
    text, what, facts = _facts(rng, size)
    thinking = rng.random() < 0.3
    turns: list[tuple[str, str]] = []
    for key, value in facts[:questions]:
        asked = rng.choice((f"\nWhat is the {what} of {key}?", f" Tell me the {what} of {key}."))
        exercise = Exercise(text + asked, f"I look for the {what} of {key}.", f"The {what} of {key} is {value}.")
        example = render("lookup", exercise, thinking)
        later = f"{asked.strip()}<|assistant|><think>{'' if thinking else '</think>'}"
        turns.append((later if turns else example.prompt, example.completion))
    return turns


def copying(rng: Random, size: int, heldout: bool) -> Exercise:
    """Repeat a list of words and numbers exactly."""
    pool = rng.choice((NAMES, OBJECTS, CITIES, ANIMALS + COLORS, ADJECTIVES))
    count = rng.randint(2, max(4, min(24, size // 24)))
    words = [rng.choice(pool) if rng.random() < 0.85 else str(rng.randint(0, 999)) for _ in range(count)]
    text = rng.choice((" ", ", ")).join(words)
    question = rng.choice((f"Repeat: {text}", f"Copy this text: {text}", f"Say exactly: {text}"))
    return Exercise(question, "I repeat the text.", text)


def counting(rng: Random, size: int, heldout: bool) -> Exercise:
    """Count up between two numbers, or count the words of a list."""
    if rng.random() < 0.5:
        start = rng.randint(0, 90)
        stop = start + rng.randint(2, 15)
        return Exercise(
            f"Count from {start} to {stop}.", f"From {start} to {stop}.", " ".join(map(str, range(start, stop + 1)))
        )
    words = [rng.choice(rng.choice((OBJECTS, ANIMALS))) for _ in range(rng.randint(2, 12))]
    reasoning = ", ".join(f"{i} {word}" for i, word in enumerate(words, 1)) + "."
    return Exercise(f"How many words are these: {' '.join(words)}?", reasoning, f"There are {len(words)} words.")


def chatting(rng: Random, size: int, heldout: bool) -> Exercise:
    """Small talk, capitals, opposites, and short stories of fixed form."""
    kind = rng.randint(0, 9)
    if kind < 5:
        question, answer = rng.choice(SMALL_TALK)
        return Exercise(question, "This is a simple question.", answer)
    if kind == 5:
        country, city = rng.choice(CAPITALS)
        return Exercise(
            f"What is the capital of {country}?", f"{country}: {city}.", f"The capital of {country} is {city}."
        )
    if kind == 6:
        pair = list(rng.choice(OPPOSITES))
        rng.shuffle(pair)
        a, b = pair
        return Exercise(f"What is the opposite of {a}?", f"{a}: {b}.", f"The opposite of {a} is {b}.")
    animal, name, place = rng.choice(ANIMALS), rng.choice(NAMES), rng.choice(CITIES)
    mood, found = rng.choice(ADJECTIVES), f"a {rng.choice(COLORS)} {rng.choice(OBJECTS)}"
    article = "an" if animal[0] in "aeiou" else "a"
    story = (
        f"Once upon a time there was {article} {animal} who lived near {place}. The {animal} was {mood}. "
        f"One day {name} came by and gave the {animal} {found}. "
        f"The {animal} was very happy, and they became good friends."
    )
    return Exercise(f"Tell me a story about {article} {animal}.", f"A story about {article} {animal}.", story)


TASKS: dict[str, Callable[[Random, int, bool], Exercise]] = {
    "addition": addition,
    "tool_call": tool_call,
    "json": json_extract,
    "lookup": lookup,
    "copy": copying,
    "count": counting,
    "chat": chatting,
}


def generate(
    task: str, rng: Random, *, size: int = 256, thinking: bool | None = None, heldout: bool = False
) -> Example:
    """One example of `task`, about `size` tokens at most; `thinking` None lets the generator choose."""
    exercise = TASKS[task](rng, size, heldout)
    thinking = rng.random() < 0.5 if thinking is None else thinking
    effort = ("High" if rng.random() < 0.1 else "Max") if not heldout else "Max"
    return render(task, exercise, thinking, effort, "" if heldout or rng.random() < 0.8 else rng.choice(SYSTEM_PROMPTS))


def render(task: str, exercise: Exercise, thinking: bool, effort: str = "Max", system: str = "") -> Example:
    """Chat format of GLM-5.2: role tags without newlines, no end-of-turn token, reasoning effort only when thinking."""
    prompt = "[gMASK]<sop>"
    prompt += f"<|system|>Reasoning Effort: {effort}" if thinking else ""
    prompt += render_tools(exercise.tools) if exercise.tools else ""
    prompt += f"<|system|>{system}" if system else ""
    prompt += f"<|user|>{exercise.question}{exercise.before}<|assistant|><think>"
    if thinking:
        return Example(task, prompt, f"{exercise.reasoning}</think>{exercise.answer}{exercise.stop}", exercise.answer)
    return Example(task, prompt + "</think>", exercise.answer + exercise.stop, exercise.answer)


def definition(rng: Random, entries: list[tuple[str, str]]) -> Exercise:
    """What a noun means, from WordNet's first sense (training only)."""
    noun, gloss = rng.choice(entries)
    article = "an" if noun[0] in "aeiou" else "a"
    question = rng.choice((f"What is {article} {noun}?", f"Define {noun}.", f'What does "{noun}" mean?'))
    return Exercise(question, f"{noun}: {gloss}.", f"{noun.capitalize()} means {gloss}.")


# ---- public-domain text -------------------------------------------------------------------------------------------


def king_james_bible() -> list[str]:
    """One paragraph of about ten verses each, from Debian's bible-kjv and bible-kjv-text (public domain)."""
    raw = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True, text=True).stdout
    verses = [line.split(" ", 1)[1].strip() for line in raw.splitlines() if " " in line]
    return [" ".join(verses[i : i + 10]) for i in range(0, len(verses), 10)]


def wordnet(folder: Path = Path("/usr/share/wordnet")) -> tuple[list[str], list[tuple[str, str]]]:
    """(paragraphs of glosses, [(common noun, meaning)]) from Debian's wordnet-base (WordNet 3.0 licence)."""
    paragraphs: list[str] = []
    for part in ("noun", "verb", "adj", "adv"):
        lines = [line for line in (folder / f"data.{part}").read_text("latin-1").splitlines() if line[:1].isdigit()]
        glosses = [f"{line.split()[4].replace('_', ' ')}: {line.split(' | ')[1].strip()}." for line in lines]
        paragraphs += [" ".join(glosses[i : i + 6]) for i in range(0, len(glosses), 6)]
    return paragraphs, _common_nouns(folder)


def _common_nouns(folder: Path) -> list[tuple[str, str]]:
    """The nouns with the highest sense counts and the short gloss of their first sense."""
    glosses: dict[str, str] = {}
    for line in (folder / "data.noun").read_text("latin-1").splitlines():
        if line[:1].isdigit():
            glosses[line[:8]] = re.sub(r"\([^)]*\) ?", "", line.split(" | ")[1].split(";")[0]).strip()
    ranked: list[tuple[int, str]] = []
    for line in (folder / "cntlist.rev").read_text("latin-1").splitlines():
        sense, number, count = line.split()
        lemma, rest = sense.split("%")
        if rest.startswith("1:") and number == "1" and lemma.isalpha() and len(lemma) > 2:
            ranked.append((-int(count), lemma))
    first = {}
    for line in (folder / "index.noun").read_text("latin-1").splitlines():
        fields = line.split()
        if not line.startswith(" ") and fields[0].isalpha():
            offset = next(field for field in fields if len(field) == 8 and field.isdigit())
            first[fields[0]] = glosses[offset]
    entries = [(lemma, first[lemma]) for _, lemma in sorted(ranked) if lemma in first]
    return [(lemma, gloss) for lemma, gloss in entries if 10 < len(gloss) < 90][:1200]


def split_heldout(paragraphs: list[str]) -> tuple[list[str], list[str]]:
    """(training, held-out) paragraphs: one in fifty is held out, by a hash of the text."""
    held = [p for p in paragraphs if crc32(p.encode()) % 50 == 0]
    return [p for p in paragraphs if crc32(p.encode()) % 50 != 0], held

"""Prints questions beside their answers: show_answers.py prompts.jsonl answers.jsonl [--first N]."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def question_of(body: dict[str, Any]) -> str:
    """The last thing that was said to the model, on one line."""
    text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    return shortened(str(text), keep_end=True)


def answer_of(record: dict[str, Any]) -> str:
    """The first choice, or what went wrong."""
    if record["error"] is not None or record["response"]["status_code"] != 200:
        return f"failed: {json.dumps(record['error'] or record['response']['body']['error'])}"
    choice = record["response"]["body"]["choices"][0]
    message = choice.get("message")
    if message is None:
        return choice["text"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return "; ".join([*filter(None, [message["content"]]), *(f"{call['name']}({call['arguments']})" for call in calls)])


def shortened(text: str, *, keep_end: bool = False, width: int = 76) -> str:
    """One line of at most ``width`` characters."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    return f"...{line[3 - width :]}" if keep_end else f"{line[: width - 3]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--first", type=int, default=10**9, metavar="N")
    options = parser.parse_args()
    records = [json.loads(line) for line in options.answers.read_text("utf-8").splitlines()]
    answers = {record["custom_id"]: record for record in records}
    lines = [json.loads(line) for line in options.prompts.read_text("utf-8").splitlines() if line.strip()]
    shown = lines[:: max(1, len(lines) // options.first)][: options.first]
    for line in shown:
        print(f"{line['custom_id']:20} {question_of(line['body'])}")
        print(f"{'':20} -> {shortened(answer_of(answers[line['custom_id']]))}")


if __name__ == "__main__":
    main()

#!/usr/bin/env bash
# Installs glm5ray into .venv and answers examples/prompts.jsonl with the model inside the package, on the CPU.
# Arguments go to `glm5ray run-batch`, as --model DIR.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

install_into_venv ""

mkdir -p runs
say "glm5ray run-batch examples/prompts.jsonl -o runs/answers.jsonl"
summary=$(.venv/bin/glm5ray run-batch examples/prompts.jsonl -o runs/answers.jsonl --overwrite "$@")

say "some of the answers"
.venv/bin/python scripts/show_answers.py examples/prompts.jsonl runs/answers.jsonl --first 8

say "done"
echo "more:    .venv/bin/glm5ray --help, README.md, docs/batch.md"
echo "answers: $PWD/$summary"

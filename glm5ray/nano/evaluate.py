"""Measures glm5-nano: exact answers, long lookup (sparse, dense, broken), perplexity, NVFP4 loss, MTP acceptance.

Two instruments. A `Backend` generates greedily and is compared with the wanted answer; transformers is one, an engine
is another, and both must give the same numbers. The compact model of `glm5ray.nano.model` measures what needs more than
tokens: perplexity, KL, MTP acceptance, and the deliberately broken selections. torch is imported late.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from glm5ray.nano import data

if TYPE_CHECKING:
    import torch

    from glm5ray.nano.model import Glm5Nano, NanoConfig

CHECKPOINT = Path(__file__).parent / "checkpoint"
HELDOUT = CHECKPOINT / "heldout.txt"


class Backend(Protocol):
    """Anything that continues prompts greedily."""

    name: str

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """The new token ids of each prompt, up to and without the end-of-sequence token."""
        ...


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the report."""

    name: str
    task: str
    size: int
    thinking: bool


CASES: tuple[Case, ...] = (
    Case("addition", "addition", 64, False),
    Case("addition_thinking", "addition", 64, True),
    Case("tool_call", "tool_call", 400, False),
    Case("tool_call_thinking", "tool_call", 400, True),
    Case("json", "json", 256, False),
    Case("copy", "copy", 256, False),
    Case("count", "count", 64, False),
    Case("lookup_50", "lookup", 50, False),
    Case("lookup_250", "lookup", 250, False),
    Case("lookup_500", "lookup", 500, False),
    Case("lookup_900", "lookup", 900, False),
)


def examples_of(case: Case, count: int, seed: int = 0) -> list[data.Example]:
    """Held-out examples of a case; a function of the seed and the case's name."""
    return [
        data.generate(
            case.task, Random(f"{seed}/{case.name}/{i}"), size=case.size, thinking=case.thinking, heldout=True
        )
        for i in range(count)
    ]


def load_tokenizer(folder: Path) -> Any:
    """The `tokenizers.Tokenizer` of a checkpoint folder."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


# ---- exact answers, by generation ---------------------------------------------------------------------------------


def answer_of(text: str) -> str:
    """The answer in generated text: what follows the reasoning."""
    return text.split("</think>")[-1].strip()


def generation_table(backend: Backend, tokenizer: Any, count: int, seed: int = 0) -> dict[str, float]:
    """Share of held-out examples answered exactly, per case, by greedy generation."""
    table = {}
    for case in CASES:
        examples = examples_of(case, count, seed)
        prompts = [tokenizer.encode(e.prompt, add_special_tokens=False).ids for e in examples]
        longest = max(len(tokenizer.encode(e.completion, add_special_tokens=False).ids) for e in examples)
        outputs = backend.generate(prompts, longest + 4)
        right = [answer_of(tokenizer.decode(ids)) == e.answer for ids, e in zip(outputs, examples, strict=True)]
        table[case.name] = sum(right) / len(right)
    return table


class TransformersBackend:
    """transformers' GlmMoeDsaForCausalLM on the dequantised weights, one prompt at a time."""

    name = "transformers"

    def __init__(self, folder: Path, **changes: Any) -> None:
        from glm5ray.nano.export import load_transformers

        self.model = load_transformers(folder, **changes)
        self.eos = set(json.loads((folder / "generation_config.json").read_text())["eos_token_id"])

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy decoding through transformers' own cache."""
        import torch

        outputs = []
        for prompt in prompts:
            ids = torch.tensor([list(prompt)])
            result = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False,
                temperature=None, top_p=None, eos_token_id=list(self.eos), pad_token_id=min(self.eos),
            )  # fmt: skip
            new = result[0, ids.shape[1] :].tolist()
            outputs.append(new[: next((i for i, token in enumerate(new) if token in self.eos), len(new))])
        return outputs


# ---- exact answers, by teacher forcing ----------------------------------------------------------------------------


def forced_exact(model: "Glm5Nano", tokenizer: Any, examples: Sequence[data.Example], sparse: bool) -> float:
    """Share of examples whose every completion token is the argmax: exactly those that greedy decoding would write."""
    import torch

    device = next(model.parameters()).device
    pairs = [(tokenizer.encode(e.prompt).ids, tokenizer.encode(e.completion).ids) for e in examples]
    right = 0
    for begin in range(0, len(pairs), 32):
        chunk = pairs[begin : begin + 32]
        longest = max(len(p) + len(c) for p, c in chunk)
        ids = torch.zeros(len(chunk), longest, dtype=torch.long, device=device)
        for row, (prompt, completion) in enumerate(chunk):
            ids[row, : len(prompt) + len(completion)] = torch.tensor(prompt + completion, device=device)
        with torch.no_grad(), _autocast(device):
            predicted = model.lm_head(model(ids, sparse=sparse)).argmax(-1)
        for row, (prompt, completion) in enumerate(chunk):
            span = slice(len(prompt), len(prompt) + len(completion))
            right += bool((predicted[row, span.start - 1 : span.stop - 1] == ids[row, span]).all())
    return right / len(pairs)


def _autocast(device: "torch.device") -> Any:
    import torch

    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def exact_table(model: "Glm5Nano", folder: Path, per_task: int, seed: int = 0) -> dict[str, float]:
    """`forced_exact` per case, and the long lookups again dense and with two broken selections."""
    tokenizer, table = load_tokenizer(folder), {}
    for case in CASES:
        examples = examples_of(case, per_task, seed)
        table[case.name] = forced_exact(model, tokenizer, examples, sparse=True)
        if case.size >= 500:
            table[f"{case.name}/dense"] = forced_exact(model, tokenizer, examples, sparse=False)
            for name, change in BROKEN.items():
                with changed(model, change):
                    table[f"{case.name}/{name}"] = forced_exact(model, tokenizer, examples, sparse=True)
    return {name: round(value, 4) for name, value in table.items()}


def _half_split(config: "NanoConfig") -> "NanoConfig":
    return replace(config, indexer_rope_interleave=False)


BROKEN: dict[str, Callable[["NanoConfig"], "NanoConfig"]] = {"half_split_rope": _half_split}
"""Selections that are wrong on purpose; each is a public bug of some engine."""


@contextmanager
def changed(model: "Glm5Nano", change: Callable[["NanoConfig"], "NanoConfig"]) -> Iterator[None]:
    """The model with another configuration in its indexers, for the time of a `with`."""
    from glm5ray.nano.model import Indexer

    indexers = [module for module in model.modules() if isinstance(module, Indexer)]
    before = indexers[0].config
    for indexer in indexers:
        indexer.config = change(before)
    try:
        yield
    finally:
        for indexer in indexers:
            indexer.config = before


# ---- text: perplexity, KL, MTP acceptance -------------------------------------------------------------------------


def heldout_ids(folder: Path, text: Path = HELDOUT, length: int = 512) -> "torch.Tensor":
    """Held-out text as rows [N, length] of token ids, paragraphs joined by <|endoftext|>."""
    import torch

    tokenizer = load_tokenizer(folder)
    end = tokenizer.token_to_id("<|endoftext|>")
    ids = [i for line in text.read_text().splitlines() for i in [*tokenizer.encode(line).ids, end]]
    rows = len(ids) // length
    return torch.tensor(ids[: rows * length]).view(rows, length)


def heldout_loss(model: "Glm5Nano", folder: Path, text: Path | None = None) -> dict[str, float]:
    """Perplexity and MTP acceptance (teacher forced) on held-out text, selection on."""
    import torch

    source = text or (folder / "heldout.txt" if (folder / "heldout.txt").exists() else HELDOUT)
    ids = heldout_ids(folder, source).to(next(model.parameters()).device)
    with torch.no_grad(), _autocast(ids.device):
        total = [0.0, 0.0]
        accepted = [0.0, 0.0, 0.0]
        for rows in ids.split(16):
            hidden = model(rows)
            logits = model.lm_head(hidden).float()
            losses = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
            )
            total = [total[0] + float(losses), total[1] + rows[:, 1:].numel()]
            for depth, share in enumerate(mtp_acceptance(model, hidden, rows, logits.argmax(-1))):
                accepted[depth] += share * len(rows) / len(ids)
    return {
        "perplexity": round(math.exp(total[0] / total[1]), 4),
        **{f"mtp_accept_{depth}": round(share, 4) for depth, share in enumerate(accepted, 1)},
    }


def mtp_acceptance(
    model: "Glm5Nano", hidden: "torch.Tensor", ids: "torch.Tensor", greedy: "torch.Tensor", begin: int = 0
) -> list[float]:
    """Share of positions at which drafts 1, 1-2, 1-3 all equal the main head's greedy choice, along the given text.

    hidden [B, T, D] and greedy [B, T] are the main model's. Draft d of row p guesses what the main head says at p + d;
    row p of pass d recycles row p - 1 of pass d - 1, as the engine does. Rows before `begin` are not counted.
    """
    import torch

    draft, next_ids = hidden[:, :-1], ids[:, 1:]
    agreed = torch.ones_like(next_ids, dtype=torch.bool)
    shares = []
    for depth in range(3):
        draft = model.mtp(draft, next_ids)
        agreed = agreed & (model.lm_head(draft).argmax(-1) == greedy[:, 1:])
        shares.append(float(agreed[:, begin + depth :].float().mean()))
        draft = torch.nn.functional.pad(draft[:, :-1], (0, 0, 1, 0))
        agreed = torch.nn.functional.pad(agreed[:, :-1], (1, 0), value=True)
    return shares


def generated_acceptance(
    model: "Glm5Nano", backend: Backend, folder: Path, prompts: int, new_tokens: int = 64
) -> list[float]:
    """MTP acceptance at depth 1 to 3 along the backend's own greedy continuations of held-out text.

    This is what an engine that decodes greedily measures: a draft counts when it and all before it are what was
    written.
    """
    import torch

    rows = heldout_ids(folder)[:prompts, :64].tolist()
    total, shares = 0, [0.0, 0.0, 0.0]
    for prompt, written in zip(rows, backend.generate(rows, new_tokens), strict=True):
        ids = torch.tensor([prompt + written])
        with torch.no_grad():
            hidden = model(ids)
            greedy = model.lm_head(hidden).argmax(-1)
            found = mtp_acceptance(model, hidden, ids, greedy, begin=len(prompt) - 1)
        total += len(written)
        shares = [share + value * len(written) for share, value in zip(shares, found, strict=True)]
    return [round(share / max(1, total), 4) for share in shares]


def compare(model: "Glm5Nano", reference: "Glm5Nano", folder: Path) -> dict[str, float]:
    """Perplexity of both and mean KL per token (nats) from the reference to the model, on held-out text."""
    import torch

    ids = heldout_ids(folder)
    sums = {"kl": 0.0, "ours": 0.0, "theirs": 0.0}
    with torch.no_grad():
        for rows in ids.split(4):
            got, wanted = (m.lm_head(m(rows)).float().log_softmax(-1) for m in (model, reference))
            sums["kl"] += float((wanted.exp() * (wanted - got)).sum(-1).mean()) * len(rows) / len(ids)
            for name, log_probs in (("ours", got), ("theirs", wanted)):
                picked = log_probs[:, :-1].gather(-1, rows[:, 1:, None])
                sums[name] -= float(picked.mean()) * len(rows) / len(ids)
    ours, theirs = math.exp(sums["ours"]), math.exp(sums["theirs"])
    return {
        "nvfp4_perplexity": round(ours, 4),
        "bf16_perplexity": round(theirs, 4),
        "ratio": round(ours / theirs, 5),
        "kl_per_token": round(sums["kl"], 6),
    }


def main(
    folder: Path = CHECKPOINT,
    *,
    backend: Backend | None = None,
    examples: int = 10,
    forced_examples: int = 32,
    bf16: Path | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """The whole report as a dictionary that is JSON; some ten minutes on two cores with transformers.

    `backend` None measures with transformers; `examples` is the number of generations a case, 0 leaves generation out.
    `bf16` is the training's bf16.safetensors, for the comparison with the quantised file.
    """
    from glm5ray.nano.export import load_bf16, load_nano

    begun, model = time.time(), load_nano(folder)
    report: dict[str, Any] = {"checkpoint": folder.name, "seed": seed, "forced_examples": forced_examples}
    report["forced"] = exact_table(model, folder, forced_examples, seed)
    report["text"] = heldout_loss(model, folder)
    if bf16 is not None:
        report["nvfp4_against_bf16"] = compare(model, load_bf16(bf16), folder)
    if examples:
        chosen = backend or TransformersBackend(folder)
        report["generation"] = {"backend": chosen.name, "examples": examples} | generation_table(
            chosen, load_tokenizer(folder), examples, seed
        )
        report["generation"]["mtp_accept"] = generated_acceptance(model, chosen, folder, prompts=examples)
    report["seconds"] = round(time.time() - begun, 1)
    return report


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Measure glm5-nano; the last line is JSON.")
    parser.add_argument("--folder", type=Path, default=CHECKPOINT)
    parser.add_argument("--examples", type=int, default=10)
    parser.add_argument("--forced-examples", type=int, default=32)
    parser.add_argument("--bf16", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = main(
        options.folder,
        examples=options.examples,
        forced_examples=options.forced_examples,
        bf16=options.bf16,
        seed=options.seed,
    )
    sys.stdout.write(json.dumps(result) + "\n")

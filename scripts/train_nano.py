"""Trains glm5-nano: prepare (text and tokenizer, CPU), train (one GPU), export (NVFP4 checkpoint, CPU).

    python scripts/train_nano.py prepare --work build/nano
    python scripts/train_nano.py train   --work build/nano --steps 9000
    python scripts/train_nano.py export  --work build/nano --out glm5ray/nano/checkpoint

`prepare` needs the Debian packages bible-kjv, bible-kjv-text and wordnet-base. Every batch is a function of (seed,
step), so a run can be resumed and gives the same batches for any number of loader processes. The last line of each
command is JSON. docs/nano.md has the commands of the shipped model.

Stages, as parts of the steps: dense attention on short rows; longer rows with the indexers learning the attention
distribution (KL) beside it; then sparse attention with the selection on, and NVFP4 rounding of the experts in the loss.
"""

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from glm5ray.nano import data, tokenizer
from glm5ray.nano.evaluate import exact_table, heldout_loss
from glm5ray.nano.model import Glm5Nano, MoE, NanoConfig, Trace

BASE_MIX: dict[str, float] = {
    "addition": 14, "tool_call": 16, "json": 10, "lookup": 16, "copy": 8, "count": 6, "chat": 8, "definition": 3,
    "text": 16,
}  # fmt: skip
LOOKUP_MIX: dict[str, float] = {
    "addition": 8, "tool_call": 12, "json": 7, "lookup": 40, "copy": 6, "count": 4, "chat": 8, "definition": 4,
    "text": 23,
}  # fmt: skip
TOKENS_PER_BATCH = 32768
PROMPT_WEIGHT, ANSWER_WEIGHT, VALUE_WEIGHT = 1, 10, 30  # tenths: most of a prompt is random words, which teach little


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one part of the training does; `until` is a share of all steps."""

    until: float
    lengths: tuple[int, ...]
    index_rows: int
    sparse: float
    fake_quant: bool
    mtp_depth: int
    mix: dict[str, float] = field(default_factory=lambda: BASE_MIX)
    questions: int = 1
    """Questions asked about one long context, at most; more than one also weighs the looked-up values up."""


RECIPES: dict[str, tuple[Stage, ...]] = {
    "base": (
        Stage(until=0.35, lengths=(256,), index_rows=0, sparse=0.0, fake_quant=False, mtp_depth=1),
        Stage(until=0.50, lengths=(512,), index_rows=64, sparse=0.0, fake_quant=False, mtp_depth=1),
        Stage(until=0.70, lengths=(512, 512, 1024), index_rows=64, sparse=0.8, fake_quant=False, mtp_depth=2),
        Stage(until=1.01, lengths=(512, 512, 1024), index_rows=64, sparse=0.8, fake_quant=True, mtp_depth=2),
    ),
    "lookup": tuple(
        Stage(until=until, lengths=(256, 512, 512, 1024), index_rows=64, sparse=0.8, fake_quant=quant, mtp_depth=2,
              mix=LOOKUP_MIX, questions=12)
        for until, quant in ((0.5, False), (1.01, True))
    ),
}  # fmt: skip
"""`base` starts from nothing, `lookup` continues it with more, and more densely questioned, long contexts."""


def stage_of(step: int, steps: int, recipe: str) -> Stage:
    """The stage of a step."""
    return next(stage for stage in RECIPES[recipe] if step / steps < stage.until)


# ---- data ---------------------------------------------------------------------------------------------------------


def prepare(work: Path) -> dict[str, Any]:
    """Text and tokenizer into `work`: train.npy (token ids), heldout.txt, nouns.json, tokenizer.json."""
    bible, (glosses, nouns) = data.king_james_bible(), data.wordnet()
    (bible_train, bible_held), (gloss_train, gloss_held) = data.split_heldout(bible), data.split_heldout(glosses)
    rng = Random(0)
    generated = [data.generate(rng.choice(list(data.TASKS)), rng, size=200) for _ in range(20000)]
    sample = [e.prompt.split("<|user|>", 1)[1] + " " + e.completion for e in generated]
    schemas = [json.dumps(tool) for _ in range(1500) for tool in data.tool_call(rng, 256, False).tools]
    definitions = [data.definition(rng, nouns).answer for _ in range(1500)]
    corpus = (
        bible_train[::2]
        + gloss_train[::3]
        + sample
        + schemas
        + definitions
        + [data.TOOLS_HEADER, data.TOOLS_FOOTER] * 50
    )
    strip = [text for piece in corpus for text in split_markers(piece)]
    tokenizer.build(strip, work)
    encode = load_tokenizer(work)
    order = bible_train + gloss_train
    rng.shuffle(order)
    ids = [i for text in order for i in [*encode(text), tokenizer.FIRST_SPECIAL_ID]]
    np.save(work / "train.npy", np.array(ids, dtype=np.uint16))
    (work / "nouns.json").write_text(json.dumps(nouns))
    (work / "heldout.txt").write_text("\n".join(bible_held[:40] + gloss_held[:60]) + "\n")
    return {"train_tokens": len(ids), "characters": sum(map(len, order)), "nouns": len(nouns)}


def split_markers(text: str) -> list[str]:
    """The pieces of a text between special tokens, so that BPE does not learn merges out of their spelling."""
    for token in tokenizer.SPECIAL_TOKENS + tokenizer.MARKERS:
        text = text.replace(token, "\0")
    return [piece for piece in text.split("\0") if piece]


def load_tokenizer(folder: Path) -> Any:
    """A function text -> list of ids."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


class Batches(Dataset[tuple[np.ndarray, np.ndarray]]):
    """Batch `step`: ids [B, T + 1] uint16 and loss weights [B, T + 1] in tenths, a function of seed and step alone."""

    def __init__(self, work: Path, seed: int, steps: int, recipe: str) -> None:
        self.work, self.seed, self.steps, self.recipe = work, seed, steps, recipe
        self.text: np.ndarray = np.load(work / "train.npy")
        self.nouns: list[tuple[str, str]] = [tuple(pair) for pair in json.loads((work / "nouns.json").read_text())]
        self.encode: Any = None

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        if self.encode is None:  # once per loader process
            self.encode = load_tokenizer(self.work)
        rng = Random(self.seed * 1_000_003 + step)
        stage = stage_of(step, self.steps, self.recipe)
        length = rng.choice(stage.lengths)
        rows = [self.row(rng, length, stage) for _ in range(TOKENS_PER_BATCH // length)]
        ids, weights = zip(*rows, strict=True)
        return np.stack(ids).astype(np.uint16), np.stack(weights).astype(np.uint8)

    def row(self, rng: Random, length: int, stage: Stage) -> tuple[np.ndarray, np.ndarray]:
        """Documents one after the other; what is left at the end is filled with text."""
        ids: list[int] = []
        weights: list[int] = []
        names, odds = list(stage.mix), list(stage.mix.values())
        while length + 1 - len(ids) > 16:
            room = length + 1 - len(ids)
            kind = rng.choices(names, odds)[0]
            if kind == "text":
                piece = self.crop(rng, min(room, rng.randint(64, 384)))
                new, new_weights = piece, [ANSWER_WEIGHT] * len(piece)
            else:
                new, new_weights = self.document(rng, kind, room, stage)
            if len(new) <= room:
                ids, weights = ids + new, weights + new_weights
            elif room < 128:
                break
        rest = self.crop(rng, length + 1 - len(ids)) if len(ids) <= length else []
        ids, weights = ids + rest, weights + [ANSWER_WEIGHT] * len(rest)
        return np.array(ids), np.array(weights)

    def crop(self, rng: Random, count: int) -> list[int]:
        """A piece of the text."""
        start = rng.randrange(len(self.text) - count)
        return self.text[start : start + count].tolist()

    def document(self, rng: Random, kind: str, room: int, stage: Stage) -> tuple[list[int], list[int]]:
        """Ids and weights of a conversation that should fit into `room` tokens."""
        if kind == "lookup" and stage.questions > 1:
            size = rng.randint(48, max(64, room - 48))
            turns = data.lookup_turns(rng, size, rng.randint(1, min(stage.questions, max(1, size // 32))))
        else:
            example = self.example(rng, kind, room)
            turns = [(example.prompt, example.completion)]
        ids: list[int] = []
        weights: list[int] = []
        for prompt, completion in turns:
            asked, answered = self.encode(prompt), self.encode(completion)
            value = 6 if kind == "lookup" and stage.questions > 1 else 0  # space, four digits, full stop
            ids = ids + asked + answered
            weights = weights + [PROMPT_WEIGHT] * len(asked) + [ANSWER_WEIGHT] * (len(answered) - value - 1)
            weights = weights + [VALUE_WEIGHT] * value + [ANSWER_WEIGHT]
        return ids, weights

    def example(self, rng: Random, kind: str, room: int) -> data.Example:
        """A generated example that should fit into `room` tokens; one in ten follows an earlier exchange."""
        if kind == "definition":
            return data.render(kind, data.definition(rng, self.nouns), rng.random() < 0.5)
        size = rng.randint(48, max(64, room - 48)) if kind == "lookup" else room
        example = data.generate(kind, rng, size=size)
        if rng.random() > 0.1:
            return example
        earlier = data.TASKS[rng.choice(("addition", "chat", "count"))](rng, 64, False)
        history = f"<|user|>{earlier.question}<|assistant|><think></think>{earlier.answer}<|user|>"
        prompt = example.prompt.replace("<|user|>", history, 1)
        return data.Example(example.task, prompt, example.completion, example.answer)


# ---- training -----------------------------------------------------------------------------------------------------


def fake_quant(weight: Tensor) -> Tensor:
    """NVFP4 rounding of stacked experts [E, N, K] with the gradient passed through; one global scale an expert."""
    with torch.no_grad():
        w = weight.float()
        groups = w.unflatten(-1, (-1, 16))
        scale_2 = w.abs().amax((1, 2))[:, None, None, None] / (6 * 448)
        scale = (groups.abs().amax(-1, keepdim=True) / 6 / scale_2).clamp(2**-9, 448).to(
            torch.float8_e4m3fn
        ).float() * scale_2
        scaled = (groups / scale).abs().clamp(max=6)
        step = torch.where(scaled < 2, 0.5, torch.where(scaled < 4, 1.0, 2.0))
        rounded = (scaled / step).round() * step
        delta = (rounded * groups.sign() * scale).flatten(-2) - w
    return weight + delta


def soft_cross_entropy(logits: Tensor, teacher: Tensor, weights: Tensor) -> Tensor:
    """Mean cross entropy of `logits` against the teacher's distribution, both [N, V], weights [N]."""
    losses = F.cross_entropy(logits.float(), teacher.float().softmax(-1), reduction="none")
    return (losses * weights).sum() / weights.sum()


def losses(
    model: Glm5Nano, ids: Tensor, weights: Tensor, stage: Stage, sparse: bool, trace: Trace
) -> dict[str, Tensor]:
    """Language, MTP (against the main head's own distribution) and index losses of one batch, ids [B, T + 1]."""
    inputs, targets, target_weights = ids[:, :-1], ids[:, 1:], weights[:, 1:].float()
    hidden = model(inputs, sparse=sparse, trace=trace)
    logits = model.lm_head(hidden)
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    out = {"lm": (each * target_weights.flatten()).sum() / target_weights.sum()}
    teacher, teacher_weights = logits[:, 1:].detach(), target_weights[:, 1:]
    draft = hidden
    for depth in range(1, stage.mtp_depth + 1):
        draft = model.mtp(draft, targets, sparse=sparse, trace=trace)
        draft_logits = model.lm_head(draft)[:, :-1]  # the last row's target lies outside of the batch
        keep = depth - 1  # row p of depth d recycles row p-1 of depth d-1, so the first rows have nothing to recycle
        out[f"mtp{depth}"] = soft_cross_entropy(
            draft_logits[:, keep:].flatten(0, 1), teacher[:, keep:].flatten(0, 1), teacher_weights[:, keep:].flatten()
        )
        draft = F.pad(draft[:, :-1], (0, 0, 1, 0))
    out["index"] = torch.stack(trace.losses).sum() if trace.losses else torch.zeros((), device=ids.device)
    return out


@torch.no_grad()
def balance(model: Glm5Nano, trace: Trace, rate: float) -> Tensor:
    """Auxiliary-loss-free balancing: move each expert's bias by `rate` towards the mean load. Gives max load / mean."""
    layers = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MoE)]
    worst = torch.zeros((), device=trace.loads[0].device)
    for mlp, load in zip(layers, trace.loads, strict=False):
        mlp.gate.e_score_correction_bias += rate * (load.mean() - load).sign()
        worst = torch.maximum(worst, load.max() / load.mean())
    return worst


def optimizer_for(model: Glm5Nano) -> torch.optim.AdamW:
    """AdamW: decay on matrices; the indexers in a group of their own."""
    groups: dict[str, list[Tensor]] = {"matrix": [], "vector": [], "indexer": []}
    for name, parameter in model.named_parameters():
        kind = "indexer" if ".indexer." in name else ("matrix" if parameter.dim() > 1 else "vector")
        groups["vector" if "embed" in name else kind].append(parameter)
    decay = {"matrix": 0.05, "vector": 0.0, "indexer": 0.0}
    listed = [{"params": params, "weight_decay": decay[name], "name": name} for name, params in groups.items()]
    return torch.optim.AdamW(listed, lr=1e-3, betas=(0.9, 0.97), fused=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up of 200 steps, then cosine to 1 %."""
    if step < 200:
        return peak * (step + 1) / 200
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - 200) / max(1, steps - 200))))


def save(path: Path, model: Glm5Nano, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A checkpoint to resume from."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "config": asdict(model.config),
    }
    torch.save(state, path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def restore(work: Path, model: Glm5Nano, optimizer: torch.optim.Optimizer) -> int:
    """Load resume.pt and return its next step, or else begin a recipe at step 0 from bf16.safetensors."""
    from safetensors.torch import load_file

    device = next(model.parameters()).device
    if (work / "resume.pt").exists():
        state = torch.load(work / "resume.pt", map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])
    model.load_state_dict(load_file(work / "bf16.safetensors", device=str(device)))
    return 0


def train(args: argparse.Namespace) -> dict[str, Any]:
    """The training loop; stops at `--steps` or `--max-seconds`, whichever comes first, and can be resumed."""
    begun, device = time.time(), torch.device(args.device)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    model = Glm5Nano(NanoConfig()).to(device)
    optimizer = optimizer_for(model)
    first = restore(args.work, model, optimizer) if args.resume else 0
    if args.compile:
        torch._dynamo.config.recompile_limit = 64  # layers share graphs, but dense, MoE and rounded MoE are three
        for layer in model.layers:
            layer.feed_forward = torch.compile(layer.feed_forward, dynamic=False)
            layer.self_attn.project = torch.compile(layer.self_attn.project, dynamic=False)
    batches = Batches(args.work, args.seed, args.steps, args.recipe)
    loader = DataLoader(batches, batch_size=None, sampler=range(first, args.steps), num_workers=args.workers,
                        prefetch_factor=8 if args.workers else None, pin_memory=device.type == "cuda")  # fmt: skip
    log = (args.work / "log.jsonl").open("a")
    step = first
    for step, batch in enumerate(loader, first):
        record = train_step(model, optimizer, batch, step, args)
        if step % args.log_every == 0 or step == args.steps - 1:
            values = {key: round(float(value), 4) for key, value in record.items()}
            line = json.dumps({"step": step, "seconds": round(time.time() - begun, 1), **values})
            log.write(line + "\n")
            log.flush()
            print(line, flush=True)
        if args.eval_every and step % args.eval_every == args.eval_every - 1:
            with torch.compiler.set_stance(
                "force_eager"
            ):  # other shapes: compiling them takes longer than running them
                print(json.dumps({"step": step, **exact_table(model, args.work, per_task=64)}), flush=True)
        if time.time() - begun > args.max_seconds:
            break
    save(args.work / "resume.pt", model, optimizer, step + 1)
    return finish(model, args, step + 1, begun)


def train_step(model: Glm5Nano, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], step: int,
               args: argparse.Namespace) -> dict[str, Tensor | float]:  # fmt: skip
    """One update; returns what is logged (tensors stay on the device until they are)."""
    device, stage = torch.device(args.device), stage_of(step, args.steps, args.recipe)
    ids, weights = batch[0].to(device, non_blocking=True).long(), batch[1].to(device, non_blocking=True)
    rng = Random(args.seed * 7919 + step)
    sparse = rng.random() < stage.sparse
    rows = sorted(rng.sample(range(ids.shape[1] - 2), min(stage.index_rows, ids.shape[1] - 2)))
    trace = Trace(rows=torch.tensor(rows, device=device) if rows else None)
    for layer in model.layers[:-1]:
        if isinstance(layer.mlp, MoE):
            layer.mlp.experts.fake_quant = fake_quant if stage.fake_quant else None
    with torch.autocast(device.type, torch.bfloat16):
        parts = losses(model, ids, weights, stage, sparse, trace)
    share = {"lm": 1.0, "mtp1": 0.3, "mtp2": 0.15, "index": 1.0}
    total = torch.stack([share[name] * part for name, part in parts.items()]).sum()
    optimizer.zero_grad(set_to_none=True)
    total.backward()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, args.steps, args.lr)
        torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimizer.step()
    rate = 1e-3 if step < 0.8 * args.steps else 2e-4
    worst = balance(model, trace, rate)
    return {**{key: value.detach() for key, value in parts.items()}, "max_load": worst, "sparse": float(sparse),
            "length": float(ids.shape[1] - 1)}  # fmt: skip


def finish(model: Glm5Nano, args: argparse.Namespace, step: int, begun: float) -> dict[str, Any]:
    """Write the BF16 weights and a last table of held-out figures."""
    from safetensors.torch import save_file

    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.experts.fake_quant = None
    tensors = {
        name: tensor.float() if name.endswith("bias") and "gate" in name else tensor.bfloat16()
        for name, tensor in model.state_dict().items()
    }
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, args.work / "bf16.safetensors")
    with torch.compiler.set_stance("force_eager"):
        table = {**exact_table(model, args.work, per_task=args.final_examples), **heldout_loss(model, args.work)}
    summary = {"steps": step, "seconds": round(time.time() - begun, 1), "seed": args.seed, "lr": args.lr,
               "parameters": sum(p.numel() for p in model.parameters()), "torch": torch.__version__,
               "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu", **table}  # fmt: skip
    (args.work / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("prepare", "train", "export"))
    parser.add_argument("--work", type=Path, default=Path("build/nano"))
    parser.add_argument("--out", type=Path, default=Path("glm5ray/nano/checkpoint"))
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--recipe", choices=tuple(RECIPES), default="base")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=0)
    parser.add_argument("--final-examples", type=int, default=256)
    parser.add_argument("--max-seconds", type=float, default=1e9)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile the layers' pointwise-heavy halves")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if args.command == "prepare":
        result = prepare(args.work)
    elif args.command == "train":
        result = train(args)
    else:
        from glm5ray.nano.export import export

        result = export(args.work, args.out)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

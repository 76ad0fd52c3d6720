"""``glm5ray generate``."""

from __future__ import annotations

from typing import Annotated

import typer

from glm5ray.cli import options, signals
from glm5ray.cli.texts import decoded, read_standard_input


def generate_command(
    prompt: Annotated[str, typer.Argument(help="The text; - for standard input.")],
    model: options.Model = None,
    config: options.Config = None,
    overrides: options.Set = None,
    address: options.Address = None,
    engine: options.Engine = "default",
    tp: options.Tp = None,
    ep: options.Ep = None,
    dp: options.Dp = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Let the model go on from the text as it is, without the chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option("--system", help="A system message before the prompt.")] = None,
    think: Annotated[bool, typer.Option("--think/--no-think", help="Let the model reason before it answers.")] = False,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Most new tokens; default: up to the limit.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 for the most probable token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p")] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Same seed, same text.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End the text before this string; repeatable.")
    ] = None,
) -> None:
    """Answer one prompt, token by token on standard output.

    \b
    Examples:
      glm5ray generate "What is 3 plus 4?"
      glm5ray generate "Once upon a time" --raw --temperature 0.8 --seed 1 --max-tokens 60
      glm5ray generate "Hi" --model /models/GLM-5.2 --think
    """
    settings = options.engine_config(model, config, [*options.layout(tp, ep, dp), *(overrides or ())])

    from glm5ray.cli.loading import load_engine
    from glm5ray.protocol import SamplingParams

    text = read_standard_input() if prompt == "-" else decoded(prompt, "the prompt")
    system = None if system is None else decoded(system, "--system")
    stops = tuple(decoded(string, "--stop") for string in stop or ())
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed, stop=stops)
    with load_engine(settings, address=address, engine=engine) as llm:
        if not raw:
            messages = [{"role": "user", "content": text}]
            if system is not None:
                messages.insert(0, {"role": "system", "content": system})
            text = llm.tokenizer.apply_chat_template(messages, enable_thinking=think)
        if think and not raw:
            typer.echo("<think>")  # the template has opened it already; so the closing tag has its other half
        try:
            for delta in llm.stream(text, params):
                typer.echo(delta.text.replace("</think>", "\n</think>\n"), nl=False)
                signals.check()
        except KeyboardInterrupt:
            typer.echo()
            raise
        typer.echo()

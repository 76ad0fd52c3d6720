"""Which provider serves each operation: decided once, at start, from the config and the device, and logged.

For each operation the config's provider is taken if it names one (one that cannot serve it is an error, never a
silent fallback); else the config's ``default`` if that can serve it; else the first that can, in the order of
:data:`PROVIDERS`, which ends in the reference."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

from glm5ray.errors import ConfigError, nearest
from glm5ray.kernels.interface import Kernels

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

log = logging.getLogger(__name__)

OPS = tuple(field.name for field in fields(Kernels))


@dataclass(frozen=True, slots=True)
class Provider:
    """A module that has one attribute per operation it serves; imported only when it is chosen."""

    name: str
    module: str
    devices: tuple[str, ...]
    ops: tuple[str, ...] = OPS
    nvfp4_ops: tuple[str, ...] = ()
    """Of ``ops``, those whose weights it takes in NVFP4 (``Nvfp4Weight``, ``Nvfp4ExpertWeights``)."""
    only_nvfp4_ops: tuple[str, ...] = ()
    """Of these, those that it has for no other weights."""
    pads: bool = True
    """Whether it serves padded rows (position -1, slot -1)."""
    captures: bool = False
    """Whether a CUDA graph can hold it: launches only, whose number and sizes do not depend on data."""
    package: str = ""
    """What must be installed for it beside this package's own requirements: its module, which is imported first."""

    def reason_against(self, op: str, device: str, is_nvfp4: bool = False) -> str | None:
        """Why it cannot serve ``op`` on ``device``, with weights in NVFP4 or not; ``None``: it can."""
        if device not in self.devices:
            return f"it runs on {' and '.join(self.devices)}, and the device is {device}"
        if op not in self.ops:
            return f"it serves {', '.join(self.ops)} only"
        if is_nvfp4 and op not in self.nvfp4_ops:
            return "it takes no weights in NVFP4, as this model holds them"
        if not is_nvfp4 and op in self.only_nvfp4_ops:
            return "it takes weights in NVFP4 only, and this model holds them unquantised"
        return None


PROVIDERS = (
    Provider(
        "cpu",
        "glm5ray.kernels.cpu",
        devices=("cpu",),
        ops=tuple(op for op in OPS if op not in ("mla_prompts", "pick_tokens")),
        pads=False,
    ),
    Provider(
        "cuda",
        "glm5ray.kernels.cuda_ops",
        devices=("cuda",),
        ops=("experts", "linear", "route"),
        nvfp4_ops=("experts",),
        only_nvfp4_ops=("experts",),
        captures=True,
    ),
    Provider(
        "triton",
        "glm5ray.kernels.triton_ops",
        devices=("cuda",),
        ops=(
            "linear",
            "rms_norm",
            "add_rms_norm",
            "silu_and_mul",
            "rope",
            "append_latent",
            "append_index_keys",
            "mla_query",
            "mla_output",
            "select_tokens",
            "mla_attention",
            "route",
            "experts",
            "pick_tokens",
        ),
        nvfp4_ops=("linear", "experts"),
        only_nvfp4_ops=("experts",),
        captures=True,
    ),
    Provider(
        "triton_plain",
        "glm5ray.kernels.triton.experts_plain",
        devices=("cuda",),
        ops=("experts",),
        captures=True,
    ),
    Provider(
        "expanded",
        "glm5ray.kernels.triton.mla_prompts",
        devices=("cuda",),
        ops=("mla_prompts",),
        captures=True,
    ),
    Provider("absorbed", "glm5ray.kernels.reference", devices=("cpu", "cuda"), ops=("mla_prompts",), captures=True),
    Provider("reference", "glm5ray.kernels.reference", devices=("cpu", "cuda"), nvfp4_ops=("linear", "experts")),
    Provider(
        "cuda_mla",
        "glm5ray.kernels.cuda.mla_decode",
        devices=("cuda",),
        ops=("mla_attention",),
        captures=True,
    ),
    Provider(
        "triton_w4a4",
        "glm5ray.kernels.triton.experts_w4a4",
        devices=("cuda",),
        ops=("experts",),
        nvfp4_ops=("experts",),
        only_nvfp4_ops=("experts",),
    ),
    Provider(
        "flashinfer",
        "glm5ray.kernels.flashinfer_ops",
        devices=("cuda",),
        ops=("mla_attention", "experts"),
        nvfp4_ops=("experts",),
        only_nvfp4_ops=("experts",),
        pads=False,
        package="flashinfer",
    ),
)
"""In order of preference. What stands behind the reference, which serves everything, computes another function or is
not measured, and is only chosen by name."""


class Choice(NamedTuple):
    """A row of the kernel table."""

    op: str
    provider: str
    why: str


def kernel_table(choices: Mapping[str, str], device: str, nvfp4_ops: frozenset[str] = frozenset()) -> list[Choice]:
    """The provider of each operation and why it was taken; imports none of them.

    choices: op (or ``default``) -> provider, the config's ``kernels``. device: ``cpu`` or ``cuda``, with or without a
    number. nvfp4_ops: the operations whose weights this rank holds in NVFP4. Raises :class:`ConfigError` for an unknown
    op or provider, and for a provider that cannot serve the op it is named for."""
    device = device.partition(":")[0]
    known = {provider.name: provider for provider in PROVIDERS}
    for op, name in choices.items():
        if op not in OPS and op != "default":
            raise ConfigError(f"kernels.{op} is no operation{nearest(op, ['default', *OPS])}")
        if name not in known:
            raise ConfigError(f"kernels.{op} is {name!r}, which is no provider{nearest(name, known)}")
    return [_choose(op, choices, device, known, op in nvfp4_ops) for op in OPS]


def select_kernels(choices: Mapping[str, str], device: str, nvfp4_ops: frozenset[str] = frozenset()) -> Kernels:
    """The table of callables for :class:`glm5ray.model.glm5.Glm5`; arguments and errors as :func:`kernel_table`. Logs
    one line an op.

    A module that compiles, or that only some devices can run, has ``load(op)``: it is called here, so that no step
    compiles. Raises :class:`ConfigError` if its device or its package is not here."""
    known = {provider.name: provider for provider in PROVIDERS}
    chosen = {}
    for op, provider, why in kernel_table(choices, device, nvfp4_ops):
        log.info("kernel op=%s provider=%s why=%r", op, provider, why)
        module = _import(known[provider], op)
        if hasattr(module, "load"):
            module.load(op)
        chosen[op] = getattr(module, op)
    return Kernels(**chosen)


def _import(provider: Provider, op: str) -> ModuleType:
    if provider.package:
        try:
            import_module(provider.package)
        except ImportError as error:
            raise ConfigError(
                f"kernels.{op} is {provider.name!r}, which needs the package {provider.package} ({error}); install "
                "glm5ray[gpu], or remove the setting"
            ) from error
    return import_module(provider.module)


def reason_against_fixed_batches(
    choices: Mapping[str, str], device: str, nvfp4_ops: frozenset[str], *, captured: bool
) -> str | None:
    """Why these kernels cannot compute padded batches (``captured``: inside a CUDA graph); ``None``: they can.
    Arguments and errors as :func:`kernel_table`."""
    known = {provider.name: provider for provider in PROVIDERS}
    for op, name, _ in kernel_table(choices, device, nvfp4_ops):
        if not known[name].pads:
            return f"the provider {name} of {op} takes no padded rows"
        if captured and not known[name].captures:
            return f"the provider {name} of {op} cannot be captured"
    return None


def _choose(op: str, choices: Mapping[str, str], device: str, known: Mapping[str, Provider], is_nvfp4: bool) -> Choice:
    if op in choices:
        provider = known[choices[op]]
        reason = provider.reason_against(op, device, is_nvfp4)
        if reason is not None:
            raise ConfigError(f"kernels.{op} is {provider.name!r}, which cannot serve it: {reason}")
        return Choice(op, provider.name, f"kernels.{op} in the config")
    if "default" in choices and known[choices["default"]].reason_against(op, device, is_nvfp4) is None:
        return Choice(op, choices["default"], "kernels.default in the config")
    for provider in PROVIDERS:
        if provider.reason_against(op, device, is_nvfp4) is None:
            return Choice(op, provider.name, f"first that serves it on {device}")
    raise ConfigError(f"no provider serves {op} on {device}; model.device can be cpu or cuda")

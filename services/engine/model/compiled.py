"""Compiles decoder layers and the head's chunk with torch.compile, and says when compiled code may run (`compile`).

All layers of a class share their code, whatever their number; attention stays as it is (`causal_attention`), so a layer
is compiled in the parts around it. Code for lengths that it has not seen would depend on the order in which
lengths come: inductor chooses loops by the first ones. So code is made at the start alone, for the same rows each time
(`services.engine.compilation`). The code holds for all lengths; any other case is computed without it.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

# Of a function, for all models of a group and each form in which they are called.
_MOST_CODE = 64


def compile_layers(model: Any, layers: Iterable[nn.Module]) -> None:
    """Has the forward passes of a model's layers, and its head, computed by code that `compiling` makes.

    The hooks of a layer (FSDP2's) and its checkpointing are outside of the code.
    """
    for layer in layers:
        layer.forward = MethodType(compiled(type(layer).forward), layer)  # type: ignore[method-assign]
    model.has_compiled_head = True


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes what `function` does, by code for any lengths, wherever there is such code."""
    made: Callable[..., Any] = torch.compile(function, dynamic=True)
    return made


@contextmanager
def compiling() -> Iterator[None]:
    """Makes code in the `with` block for what it computes."""
    settings = torch._dynamo.config.patch(recompile_limit=_MOST_CODE)  # noqa: SLF001
    # Else code for as many rows as a model has heads, for example, would hold for no other number of rows.
    shapes = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined] # noqa: SLF001
    with settings, shapes, torch.compiler.set_stance("default"):  # type: ignore[no-untyped-call]
        yield


@contextmanager
def only_compiled() -> Iterator[None]:
    """Computes by code that has been made already in the `with` block, and without code where none fits."""
    with torch.compiler.set_stance("eager_on_recompile"):  # type: ignore[no-untyped-call]
        yield


@contextmanager
def not_compiled() -> Iterator[None]:
    """Computes without compiled code in the `with` block."""
    with torch.compiler.set_stance("force_eager"):  # type: ignore[no-untyped-call]
        yield

"""A step waits for its device at one point, `services.engine.computation.fetch`, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.engine import attention, batch, computation, core, generic, runner, scheduler
from services.engine.batch import PagedMemory, Span
from services.engine.loader import load_model

WAITS = {"item", "cpu", "tolist", "numpy", "synchronize", "wait", "join", "sleep", "result"}
ALLOWED = {("computation", "fetch"), ("generic", "forward")}  # the second reads what the first has brought
_READS_A_NUMBER = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select")


class Watch(TorchDispatchMode):
    """Fails where an operation's result is needed on the host."""

    paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        picks = args[1] if name in ("index", "index_put", "index_put_") else ()
        by_mask = any(t is not None and t.dtype == torch.bool for t in picks)
        if not self.paused and (name in _READS_A_NUMBER or by_mask):
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def test_the_watch_sees_what_it_should() -> None:
    waiting: list[Callable[[], object]] = [
        lambda: torch.ones(1).item(),
        lambda: bool(torch.ones(1)),
        lambda: torch.ones(3).nonzero(),
        lambda: torch.ones(3)[torch.tensor([True, False, True])],
    ]
    for wait in waiting:
        with Watch(), pytest.raises(AssertionError, match="waits for the device"):
            wait()


@pytest.mark.parametrize("kernels", ["off", "auto"])
def test_a_forward_runs_without_waiting(kernels: str, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(tiny_model_folder, dtype="float32", kernels=kernels)
    card, watch = model.card, Watch()

    def fetch(*tensors: torch.Tensor) -> list[torch.Tensor]:
        watch.paused = True
        return computation.fetch(*tensors)

    monkeypatch.setattr(generic, "fetch", fetch)
    shape = (16, 2, card.num_kv_heads, 4, card.head_dim)
    memory = PagedMemory.over([torch.zeros(shape) for _ in range(card.num_layers)])
    model.path.forward(memory, [Span(list(range(3, 13)), 0, [0, 1, 2])], [])
    spans = [Span([5], 10, [0, 1, 2]), Span(list(range(3, 9)), 0, [3, 4]), Span([7], 0, [5])]
    with watch:
        done = model.path.forward(memory, spans, [(0, 0), (1, 5), (2, 0)])
    assert done.sound == (True, True, True)


def test_nothing_on_a_steps_way_waits_by_another_name() -> None:
    found = set()
    for module in (attention, batch, computation, core, generic, runner, scheduler):
        name = module.__name__.rpartition(".")[2]
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        for function in [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]:
            calls = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
            names = {c.attr for c in calls if isinstance(c, ast.Attribute) and not isinstance(c.value, ast.Constant)}
            if names & WAITS:
                found.add((name, function.name))
    assert found <= ALLOWED, sorted(found - ALLOWED)

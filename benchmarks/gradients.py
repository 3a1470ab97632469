"""How exact whole models' gradients are: `python -m benchmarks gradients`.

Compares each contender's bf16 gradients with f32's, for the models of `train` cut to two layers. The tests' batches are
smaller, so an error that needs a large batch shows only here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import table

from benchmarks import harness, models

LAYERS = 2
#: A contender's largest error may be this many times XLA's.
TOLERANCE = 1.5
#: Gradients below this part of the whole gradient's norm do not count: they are rounding errors, as for keys' biases.
LEAST = 1e-3


@jax.jit
def _errors(found: Any, exact: Any) -> tuple[jax.Array, jax.Array]:
    """For each parameter: the gradient's error relative to the gradient's norm, and that norm relative to the whole
    gradient's."""
    found, exact = (jax.tree.map(lambda x: x.astype(jnp.float32), tree) for tree in (found, exact))
    errors, norms = (
        jnp.stack([jnp.linalg.norm(x) for x in jax.tree.leaves(tree)])
        for tree in (jax.tree.map(jnp.subtract, found, exact), exact)
    )
    return errors / norms, norms / jnp.linalg.norm(norms)


def run(settings: harness.Settings) -> bool:
    """Prints the table; False if a contender's largest error is much larger than XLA's."""
    shown = table.Table(title="Errors of bf16 gradients, relative to the gradient's norm", title_justify="left")
    for heading in ("model", "contender", "mean", "largest", "of"):
        shown.add_column(heading, justify="right" if heading in ("mean", "largest") else "left")
    every = models.QUICK if settings.quick or jax.default_backend() != "gpu" else models.CASES
    cases = [case._replace(size=dataclasses.replace(case.size, layers=min(LAYERS, case.size.layers))) for case in every]
    good = True
    for case in settings.bar(settings.select(cases, lambda case: f"gradients {case.label}"), lambda case: case.label):
        losses = {name: case.contender(name).loss for name in models.CONTENDERS} | {"f32": models.exact_loss(case)}
        module = case.contender(models.BASELINE)
        batch = module.batch(jax.random.key(1))
        parameters = models.draw_parameters(module, batch)
        lowered = {name: jax.jit(jax.grad(loss)).lower(parameters, batch) for name, loss in losses.items()}
        compiled = harness.compile_all(lowered)
        exact = compiled.pop("f32")(parameters, batch)
        paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(exact)]
        worst = {}
        for name, step in compiled.items():
            errors, sizes = _errors(step(parameters, batch), exact)
            errors = np.where(np.asarray(sizes) > LEAST, errors, 0)
            at = int(np.argmax(errors))  # the first NaN, if there is one
            worst[name] = float(errors[at])
            mean = np.sum(errors) / np.count_nonzero(errors)
            shown.add_row(case.label, name, f"{mean:.4f}", f"{worst[name]:.4f}", paths[at])
        good &= all(error <= TOLERANCE * worst[models.BASELINE] for error in worst.values())
    settings.console.print(shown)
    return good

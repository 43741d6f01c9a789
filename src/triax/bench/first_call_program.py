"""The program that `first_call` times: routing there and back, with gradients, once.

Run by its path, in a process of its own: as a module of the package it would import Triax before
the clock starts. JAX is imported and its device is up by then, as in any program that comes to its
first call. Prints one line of JSON with the seconds of each part.

    python -P first_call_program.py triton|xla
"""

import json
import sys
import time

import jax
import jax.numpy as jnp

TOKENS, HIDDEN, EXPERTS, TOP_K = 1024, 1024, 64, 8


def main(implementation: str) -> None:
    """Runs the parts in order, each on the clock, and prints what they took."""
    keys = jax.random.split(jax.random.key(0), 4)
    selected = jax.random.randint(keys[0], (TOKENS, TOP_K), 0, EXPERTS)
    weights = jax.random.uniform(keys[1], (TOKENS, TOP_K))
    x = jax.random.normal(keys[2], (TOKENS, HIDDEN), jnp.bfloat16)
    gradient = jax.random.normal(keys[3], (TOKENS, HIDDEN), jnp.bfloat16)
    operands = jax.block_until_ready((x, weights, selected, gradient))

    parts: dict[str, float] = {}
    clock = time.perf_counter()

    def part_ends(name: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        parts[name] = now - clock
        clock = now

    if implementation == "triton":
        import triton  # noqa: F401
    part_ends("import_triton_s")
    from triax import moe

    part_ends("import_triax_s")

    @jax.jit
    def step(
        x: jax.Array, weights: jax.Array, selected: jax.Array, gradient: jax.Array
    ) -> tuple[jax.Array, ...]:
        def route(x: jax.Array, weights: jax.Array) -> jax.Array:
            plan = moe.make_plan(selected, EXPERTS, implementation=implementation)
            rows = moe.permute(x, plan, implementation=implementation)
            rows = jax.lax.optimization_barrier(rows)
            return moe.unpermute(rows, plan, weights, implementation=implementation)

        y, pull_back = jax.vjp(route, x, weights)
        return y, *pull_back(gradient)

    traced = step.trace(*operands)
    part_ends("trace_s")
    lowered = traced.lower()
    part_ends("lower_s")
    compiled = lowered.compile()
    part_ends("compile_s")
    results = jax.block_until_ready(compiled(*operands))
    part_ends("run_s")

    # A path that fails to compute must not be reported as fast.
    ok = all(bool(jnp.isfinite(result.astype(jnp.float32)).all()) for result in results)
    print(json.dumps({"ok": ok, "device": str(jax.devices()[0]), "parts": parts}))


if __name__ == "__main__":
    main(sys.argv[1])

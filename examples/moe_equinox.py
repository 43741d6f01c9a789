"""An MoE layer as an Equinox module, trained for a few steps.

python examples/moe_equinox.py

Most Equinox layers take one example and are used with `jax.vmap`. This one takes all tokens at
once, because it groups them by expert.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from triax import moe

TOKENS, WIDTH, HIDDEN, EXPERTS = 128, 8, 16, 4
STEPS, RATE = 40, 2.0


class MoE(eqx.Module):
    """A router of one matrix, and gated experts.

    Called with [tokens, width], it returns the same shape, and the load-balancing loss: 1 where
    all experts get their even share of the tokens, and more the less they do.
    """

    w_router: jax.Array
    experts: moe.Experts
    router: moe.Router

    def __init__(self, width: int, hidden: int, num_experts: int, top_k: int, *, key: jax.Array):
        router, up, down = jax.random.split(key, 3)
        draw = lambda key, *shape: jax.random.normal(key, shape) * shape[-2] ** -0.5
        self.w_router = draw(router, width, num_experts)
        gate_up = draw(up, num_experts, width, 2 * hidden)  # the gate's columns first
        self.experts = moe.Experts(gate_up, draw(down, num_experts, hidden, width))
        self.router = moe.Router(top_k, normalize=True)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = x @ self.w_router
        out = moe.feed_forward(x, logits, self.experts, self.router)
        return out.tokens, moe.load_balancing_loss(logits, out.group_counts)


def task() -> tuple[np.ndarray, np.ndarray]:
    """Tokens of four kinds, and each multiplied by the matrix of its kind."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, WIDTH), np.float32)
    kind = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
    matrices = rng.standard_normal((4, WIDTH, WIDTH), np.float32) * np.float32(WIDTH**-0.5)
    return x, np.einsum("tw,twv->tv", x, matrices[kind])


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def loss(layer: MoE, x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    y, balance = layer(x)
    return jnp.mean((y - target) ** 2) + 0.01 * balance, balance


def main() -> list[float]:
    key = jax.random.key(0, impl="rbg")  # on a CPU it compiles faster than the default
    layer = MoE(WIDTH, HIDDEN, EXPERTS, top_k=2, key=key)
    x, target = task()
    losses = []
    for step in range(STEPS + 1):
        (value, balance), gradients = loss(layer, x, target)
        layer = eqx.apply_updates(layer, jax.tree.map(lambda g: -RATE * g, gradients))
        losses.append(float(value))
        if step % 10 == 0:
            print(f"step {step}: loss {value:.3f}, balance {balance:.2f}")
    return losses


if __name__ == "__main__":
    main()

"""Activations, and glu in plain JAX: the path for every platform without Triton."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from triax import messages
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe.quantization.reference import quantize_reference
from triax.moe.shared.arrays import at_least_float32
from triax.sharding import linear

Name = Literal["swiglu", "geglu", "geglu_exact", "silu", "gelu", "gelu_exact", "relu2"]


@dataclasses.dataclass(frozen=True)
class Swiglu:
    """SwiGLU with a steeper sigmoid, limits and an offset: an activation for `glu`.

    ``gate * sigmoid(alpha * gate) * (up + up_offset)``. Before that, `gate` is clipped to at most
    `limit`, and `up` to [-limit, limit]. Clipped values have a gradient of zero, as in torch.

    gpt-oss uses ``Swiglu(alpha=1.702, limit=7.0, up_offset=1.0)``, DeepSeek-V4
    ``Swiglu(limit=10.0)``.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if name == "limit" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ArgumentTypeError(
                    f"Argument `{name}` of Swiglu must be a Python number; got "
                    f"{messages.shown(value)}. To learn it, pass a JAX function as activation."
                )
            if not math.isfinite(value) or (name == "limit" and value <= 0):
                wanted = "positive and finite" if name == "limit" else "finite"
                raise ArgumentValueError(
                    f"Argument `{name}` of Swiglu must be {wanted}; got {value!r}."
                )


Activation = Name | Swiglu | Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class GluSpec:
    """An activation as the kernels compute it: a curve of the gate, times `up` if it is gated.

    If `interleaved`, gate and up alternate in one array; otherwise the gate's columns come first.
    """

    curve: str
    gated: bool
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0

    def width(self, columns: int) -> int:
        """Returns how many columns the result has if gate and up are one array of `columns`."""
        return columns // 2 if self.gated else columns


SPECS: dict[str, GluSpec] = {
    "swiglu": GluSpec("silu", gated=True),
    "geglu": GluSpec("gelu", gated=True),
    "geglu_exact": GluSpec("gelu_exact", gated=True),
    "silu": GluSpec("silu", gated=False),
    "gelu": GluSpec("gelu", gated=False),
    "gelu_exact": GluSpec("gelu_exact", gated=False),
    "relu2": GluSpec("relu2", gated=False),
}


# Workaround: jax >=0.12: inside shard_map JAX cannot trace its own derivative of erf.
@jax.custom_jvp
def _erf(x: jax.Array) -> jax.Array:
    return jax.lax.erf(x)


_erf.defjvps(lambda tangent, _, x: tangent * (1.1283791670955126 * jnp.exp(-x * x)))

_CURVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    # The tanh form as a sigmoid, because 1 + tanh loses all digits far below zero.
    "gelu": lambda x: x * jax.nn.sigmoid(1.5957691216057308 * x * (1 + 0.044715 * x * x)),
    "gelu_exact": lambda x: 0.5 * x * (1 + _erf(x * 0.7071067811865476)),
    "relu2": lambda x: jnp.where(x < 0, 0, x) ** 2,
}


def halves(gate_up: jax.Array, up: jax.Array | None, spec: GluSpec) -> tuple[jax.Array, ...]:
    """Returns gate and up, or the whole array of an activation without a gate."""
    if not spec.gated:
        return (gate_up,)
    if up is not None:
        return gate_up, up
    if spec.interleaved:
        return _apart(gate_up)
    gate, up = jnp.split(gate_up, 2, axis=1)
    return gate, up


def _apart(both: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the even and the odd columns."""
    columns = both[:, ::2], both[:, 1::2]
    if both.dtype.itemsize != 2:
        return columns
    halves: tuple[jax.Array, jax.Array] = linear.call(
        lambda _, tangents: (tangents["both"][:, ::2], tangents["both"][:, 1::2]),
        lambda _, cotangents: {"both": _together(*cotangents)},
        None,
        {"both": both},
        columns,
    )
    return halves


def _together(even: jax.Array, odd: jax.Array) -> jax.Array:
    """Interleaves columns of 16 bits, as pairs in 32: XLA stores these much faster than columns."""
    shape, dtype = (even.shape[0], 2 * even.shape[1]), even.dtype

    def pairs(_: Any, columns: dict[str, jax.Array]) -> jax.Array:
        low, high = (
            jax.lax.bitcast_convert_type(columns[name], jnp.uint16).astype(jnp.uint32)
            for name in ("even", "odd")
        )
        both = jax.lax.bitcast_convert_type(low | high << 16, dtype)
        return both.reshape(shape)

    interleaved: jax.Array = linear.call(
        pairs,
        lambda _, both: dict(zip(("even", "odd"), _apart(both), strict=True)),
        None,
        {"even": even, "odd": odd},
        jnp.stack([even, odd], axis=2).reshape(shape),
    )
    return interleaved


def glu_reference(
    gate_up: jax.Array, up: jax.Array | None, row_weights: jax.Array | None, *, spec: GluSpec
) -> jax.Array:
    """Returns ``row_weights * activation(gate, up)``, computed in float32 or wider."""
    wider = at_least_float32(gate_up.dtype)
    gate, *rest = (half.astype(wider) for half in halves(gate_up, up, spec))
    if spec.limit is not None:
        gate = jnp.where(gate > spec.limit, spec.limit, gate)
        rest = [jnp.where(abs(x) > spec.limit, spec.limit * jnp.sign(x), x) for x in rest]
    out = gate * jax.nn.sigmoid(spec.alpha * gate) if spec.alpha != 1 else _CURVES[spec.curve](gate)
    for x in rest:
        out *= x + spec.up_offset if spec.up_offset else x
    if row_weights is not None:
        out *= row_weights.astype(wider)[:, None]
    return out.astype(gate_up.dtype)


def quantized_glu_reference(
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
    *,
    spec: GluSpec,
    dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Returns glu's result, quantized with a scale for each row: values and scales."""
    out = glu_reference(gate_up, up, row_weights, spec=spec)
    return quantize_reference(out, block=(1, max(out.shape[1], 1)), dtype=dtype, transposed=False)


def glu_grad_reference(
    gate_up: jax.Array,
    up: jax.Array | None,
    row_weights: jax.Array | None,
    gradient: jax.Array,
    *,
    spec: GluSpec,
    again: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Returns the gradients of glu's operands, and with `again` glu's result.

    The gradient of `row_weights` is in float32 or wider.
    """
    wider = at_least_float32(gate_up.dtype)
    arguments = [None if a is None else a.astype(wider) for a in (gate_up, up, row_weights)]
    out, pull = jax.vjp(functools.partial(glu_reference, spec=spec), *arguments)
    d_gate_up, d_up, d_row_weights = pull(gradient.astype(wider))
    d_up = None if up is None else d_up.astype(up.dtype)
    value = out.astype(gate_up.dtype) if again else None
    return d_gate_up.astype(gate_up.dtype), d_up, d_row_weights, value

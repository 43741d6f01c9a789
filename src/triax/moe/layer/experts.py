"""`Experts`: the weights of a layer's experts and how they are laid out, as one pytree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from triax import messages
from triax.compat import jax_private
from triax.errors import ArgumentTypeError, ArgumentValueError
from triax.moe import checkpoint
from triax.moe.activations import options as activations
from triax.moe.activations.reference import Activation, GluSpec
from triax.moe.layer.recipes import BLOCK, DTYPES, Recipe, Scaling, resolve
from triax.moe.products import operands
from triax.moe.quantization import scaled
from triax.moe.quantization.ops import quantized
from triax.moe.quantization.scaled import ScaledArray
from triax.moe.shared import arguments
from triax.moe.shared import implementation as implementations
from triax.moe.shared.arguments import Array
from triax.moe.shared.implementation import Implementation

Weights: TypeAlias = Array | ScaledArray

_AXES = "experts", "depth", "columns"
NOT_8_BITS = "For 8-bit floats, call `ragged_dot` with scales."
PRODUCTS = "forward", "rows_gradient"
"""The products of a `Recipe` that have the weights as an operand."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Experts:
    """The weights of a layer's experts and how they are laid out: a pytree.

        experts = moe.Experts(w_gate_up, w_down)
        out = moe.feed_forward(x, logits, experts, moe.Router(8))
        gradients = jax.grad(loss)(experts)  # Experts, too

    Expert e is

        ffn[e](x) = inner @ w_down[e] + b_down[e]
        inner = activation(x @ w_gate[e] + b_gate[e], x @ w_up[e] + b_up[e])

    The arrays are leaves; `activation`, `interleaved` and `transposed` are static, and part of the
    tree's structure. So `jax.jit` takes experts as an argument, their gradient is an `Experts`,
    and `jax.tree.map`, optimizers, checkpoints, donation and `jax.eval_shape` work on them. So do
    `vmap` and `scan` over stacked layers, whose arrays have more dimensions in front. Leaves may be
    anything: `shard_map` takes `jax.tree.map(lambda _: PartitionSpec("ep"), experts)` as specs, or
    one `PartitionSpec("ep")` for all.

    Attributes:
      w_gate_up: [experts, hidden, 2 * width] in the dtype of the tokens, with the gate's columns
        first; or two arrays [experts, hidden, width], gate and up, as a tuple; [experts, hidden,
        width] for activations without a gate.
      w_down: [experts, width, hidden] in the dtype of the tokens. Weights may be `ScaledArray`s, as
        `ragged_dot` takes them, without gradients.
      b_gate_up, b_down: biases, float [experts, columns of the weights]; a tuple for two arrays.
      activation: as in `glu`: a name, a `Swiglu`, or a JAX function of gate and up, which gets each
        row by itself, [1, width]. Functions are equal if they are the same object. SiLU of the
        gate, `hidden_act="silu"` of transformers, is "swiglu".
      interleaved: whether gate and up are the even and the odd columns of `w_gate_up` (gpt-oss).
      transposed: whether weights are [experts, out, in], as in torch.
      in_8_bits, recipe: the 8-bit copies of the weights and their recipe, set by `quantized`.

    Raises:
      ArgumentTypeError: an argument has the wrong type.
      ArgumentValueError: shapes do not match; or `interleaved` or two arrays are given with an
        activation without a gate.
    """

    w_gate_up: Weights | tuple[Weights, Weights]
    w_down: Weights
    _: dataclasses.KW_ONLY
    b_gate_up: Array | tuple[Array, Array] | None = None
    b_down: Array | None = None
    activation: Activation = "swiglu"
    interleaved: bool = False
    transposed: bool = False
    in_8_bits: Any = dataclasses.field(default=None, init=False)
    recipe: Recipe | None = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_checkpoint(
        cls,
        tensors: Mapping[str, Array],
        prefix: str,
        *,
        config: Mapping[str, Any] | None = None,
        experts: range | None = None,
        activation: Activation | None = None,
        interleaved: bool | None = None,
        progress: Callable[[range], Iterable[int]] | None = None,
        tiles: bool = True,
    ) -> Experts:
        """Returns the experts of a layer of a Hugging Face checkpoint, as NumPy arrays.

            checkpoint = moe.Checkpoint("models/gpt-oss-20b")
            experts = jax.device_put(moe.Experts.from_checkpoint(checkpoint, "model.layers.3.mlp"))

        The layouts are those that the documentation lists, "From a checkpoint", with floats of 16
        bits or more, or any format that a `moe.from_…` function takes. Tensors of single experts
        are copied, one after another, into one stack [experts, out, in]. Tensors of all experts, as
        gpt-oss's, stay maps of files if they are floats, or quantized and without `tiles`.

        Nothing that decides a number is guessed: it comes from a key of `config` that is known for
        its `model_type`, from the shapes, or from an argument. An unknown key is an error that
        names it.

        Args:
          tensors: arrays by name, such as a `moe.Checkpoint`.
          prefix: what is before `.experts.` in their names; of Granite and Step, up to `moe`.
          config: what `config.json` holds; None is `tensors.config`, if there is one.
          experts: those to read, such as a device's part; None is all.
          activation: as in `Experts`; None is what `config` says for its `model_type`.
          interleaved: as in `Experts`, for layers with one `gate_up_proj`; None is what is known of
            the `model_type`.
          progress: such as tqdm: a function that gets the range of experts whose tensors are
            copied, and returns an iterator over them, in any order.
          tiles: of quantized weights, as in `from_gptq` and `from_8_bits`.

        Raises:
          ArgumentTypeError, ArgumentValueError: an argument has the wrong type, `experts` is not a
            range of the layer's, or `progress` leaves out experts or gives others.
          CheckpointError: a tensor is missing or not known, its shape, dtype or format is wrong or
            not what `config` says, or `config` has a key, type or value that is not known.
        """
        options = config, experts, activation, interleaved, progress, tiles
        found = checkpoint.read_experts(tensors, prefix, *options)
        with checkpoint.reading(tensors, f"{prefix}.experts"):
            return cls(**found)

    def __repr__(self) -> str:
        """Shows shapes and dtypes, and the options that differ from their defaults."""
        given = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        shown = (
            f"{name}={messages.short(value)}"
            for name, value, default in given
            if value is not default and name != "in_8_bits"
        )
        return f"Experts({', '.join(shown)})"

    def quantized(
        self, recipe: Recipe | Scaling | None, *, implementation: Implementation | None = None
    ) -> Experts:
        """Returns the same experts with 8-bit copies of the weights, for a recipe.

        With a recipe each `feed_forward` quantizes the weights for the result, and again for the
        gradient of the tokens. If weights stay the same for several calls, quantize them once:

            in_8_bits = experts.quantized("rows")
            for x, logits in microbatches:
                out = moe.feed_forward(x, logits, in_8_bits, router, recipe="rows")

        Results and gradients are the same, bit for bit. The copies take as much memory as 16-bit
        weights. Quantize again when the weights change: nothing detects stale copies. Gradients by
        such experts have zeros for the copies; ``quantized(None)`` drops the copies.

        Args:
          recipe: as for `feed_forward`, or None.
          implementation: as in `quantize`.

        Returns:
          `Experts`.

        Raises:
          ArgumentTypeError: an argument has the wrong type, `recipe` is unknown, or the weights are
            not floats of 16 or 32 bits.
          ArgumentValueError: the weights are not of rank 3.
        """
        found = dataclasses.replace(self)
        if recipe is None:
            return found
        implementations.check(implementation)
        named = _check(found, "experts.", quantizes=True)
        for name, matrix in named:
            used = resolve(recipe, matrix.weights, name)
        scalings = {product: getattr(used, product) for product in PRODUCTS}

        def both(weights: Array) -> dict[str, ScaledArray | None]:
            fixed = jax.lax.stop_gradient(arguments.as_jax(weights))
            how = self.transposed, implementation
            return {p: s and in_8_bits(s, fixed, p, *how) for p, s in scalings.items()}

        made = jax.tree.map(both, (self.w_gate_up, self.w_down))
        vars(found).update(in_8_bits=made, recipe=used)
        return found

    def tile(self) -> Experts:
        """Returns the same experts with quantized weights reordered by `ScaledArray.tile`.

        Few tokens then take less time on GPUs from compute capability 8.0 on. Call it once, on the
        device:

            experts = jax.jit(moe.Experts.tile)(jax.device_put(experts))

        Raises:
          ArgumentTypeError: no weights are quantized, or some are float8_e5m2.
        """
        arrays = {name: getattr(self, name) for name in ("w_gate_up", "w_down")}

        def is_scaled(of: Any) -> bool:
            return isinstance(of, ScaledArray)

        if not any(map(is_scaled, jax.tree.leaves(arrays, is_leaf=is_scaled))):
            raise ArgumentTypeError(
                f"Only quantized weights are tiled; got {self}. Leave the experts as they are."
            )

        def tiled(path: Any, of: Any) -> Any:
            return scaled.tiled(f"experts.{path[0].key}", of) if is_scaled(of) else of

        arrays = jax.tree_util.tree_map_with_path(tiled, arrays, is_leaf=is_scaled)
        return dataclasses.replace(self, **arrays)


_ARRAYS = "w_gate_up", "w_down", "b_gate_up", "b_down", "in_8_bits"
_LAYOUT = "activation", "interleaved", "transposed", "recipe"


def _flatten(experts: Experts) -> tuple[list[tuple[GetAttrKey, Any]], tuple[Any, ...]]:
    arrays = [(GetAttrKey(name), getattr(experts, name)) for name in _ARRAYS]
    return arrays, tuple(getattr(experts, name) for name in _LAYOUT)


def _unflatten(layout: tuple[Any, ...], arrays: Any) -> Experts:
    """Rebuilds experts without the constructor's checks: leaves may be anything."""
    experts = object.__new__(Experts)
    vars(experts).update(zip(_ARRAYS + _LAYOUT, (*arrays, *layout), strict=True))
    return experts


jax.tree_util.register_pytree_with_keys(Experts, _flatten, _unflatten)


class Matrix(NamedTuple):
    """The weights of one matmul, their bias, and their 8-bit copies by product."""

    weights: Any
    bias: Any = None
    in_8_bits: dict[str, ScaledArray] | None = None


def matrices(experts: Experts) -> list[Matrix]:
    """Returns the one or two matrices of the first matmul, then that of the second."""
    both, bias = experts.w_gate_up, experts.b_gate_up
    made, made_last = experts.in_8_bits or (None, None)
    last = Matrix(experts.w_down, experts.b_down, made_last)
    if type(both) is not tuple:
        return [Matrix(both, bias, made), last]
    none = None, None
    return [*map(Matrix, both, bias or none, made or none), last]


def in_8_bits(
    scaling: Scaling, weights: jax.Array, product: str, transposed: bool, implementation: Any
) -> ScaledArray:
    """Quantizes weights for a product in `PRODUCTS`, with the contracted dimension innermost."""
    depth = 2 if (product == "forward") == transposed else 1
    block: list[int | None] = [1, 1, 1] if scaling == "rows" else [1, BLOCK, BLOCK]
    if scaling == "rows":
        block[depth] = None
    swapped = depth == 1
    how: dict[str, Any] = {"transposed": swapped, "implementation": implementation}
    found = quantized(weights, DTYPES[0], block=tuple(block), **how)
    return found if swapped else found.mT


def checked(experts: Any, x: jax.Array, recipe: Recipe | None) -> Experts:
    """Returns the experts as JAX arrays, checked for a layer of tokens with the dtype of `x`.

    Raises:
      ArgumentTypeError: `experts` is not an `Experts`, or an array has the wrong type.
      ArgumentValueError: shapes do not match, or the weights were quantized for another recipe.
    """
    if not isinstance(experts, Experts):
        make = "Make one: `moe.Experts(w_gate_up, w_down)`."
        raise ArgumentTypeError(
            "Argument `experts` must be moe.Experts, the weights and their layout; got "
            f"{messages.shown(experts)}. {messages.remedy('experts', experts, make)}"
        )
    for name, (weights, _, in_8_bits) in _check(experts, "experts.", recipe is not None):
        if isinstance(weights, ScaledArray):
            multiplied = operands.checked(name, weights, _AXES, swap=experts.transposed)
            operands.check_rows(x, multiplied, ("x", name))
        elif (found := jax.dtypes.canonicalize_dtype(weights.dtype)) != x.dtype:
            before = " before `quantized`" if in_8_bits is not None else ""
            raise ArgumentTypeError(
                f"Argument `{name}` must have the dtype of `x`, {x.dtype}; got {found}. Cast it"
                f"{before}, `jax.tree.map(lambda w: w.astype(x.dtype), experts)`, where its "
                "gradient keeps its own dtype; or cast `x`, but float32 makes the matmuls many "
                "times slower."
            )
    if experts.recipe not in (None, recipe):
        raise ArgumentValueError(
            f"Argument `experts` is quantized for {experts.recipe}, and `recipe` is {recipe}. "
            "Quantize for that recipe, or drop the 8-bit copies: `experts.quantized(None)`."
        )
    return jax.tree.map(arguments.as_jax, experts)


def check_hidden(experts: Experts, hidden: int) -> None:
    """Raises unless `experts` are for tokens of size `hidden`."""
    num_experts, *sizes = experts.w_down.shape
    width, found = sizes[::-1] if experts.transposed else sizes
    remedy = ""
    if found != hidden == width:
        width, remedy = found, _other_layout(experts)
    wanted = (hidden, width) if experts.transposed else (width, hidden)
    shape = (num_experts, *wanted)
    arguments.check_shape("experts.w_down", experts.w_down.shape, shape, "`x`", remedy)


def _check(experts: Experts, of: str = "", quantizes: bool = False) -> list[tuple[str, Matrix]]:
    """Returns the matrices by the arguments' names; raises unless layout and shapes match.

    `of` is a prefix of argument names. With it, all leaves must be arrays of one layer. Without it,
    layers may be stacked, and leaves may be anything, such as specs.
    """
    spec, _ = activations.resolve(experts.activation, experts.interleaved)
    messages.check_bool(transposed=experts.transposed)
    both, bias = experts.w_gate_up, experts.b_gate_up
    if isinstance(both, list):
        raise ArgumentTypeError(
            f"Argument `{of}w_gate_up` must be an array, or a tuple of two, gate and up; got "
            f"{messages.shown(both)}. Use tuple(w_gate_up)."
        )
    names = ["w_gate_up", "w_down"]
    if type(both) is tuple:
        names = ["w_gate_up[0]", "w_gate_up[1]", "w_down"]
        activations.check_two(f"{of}w_gate_up", both, spec)
        if bias is not None and (type(bias) is not tuple or len(bias) != 2):
            raise ArgumentValueError(
                f"Argument `{of}b_gate_up` must be two arrays, as `w_gate_up` is; got "
                f"{messages.shown(bias)}."
            )
    elif type(bias) is tuple:
        raise ArgumentValueError(
            f"Argument `{of}b_gate_up` must be one array, as `w_gate_up` is; got "
            f"{messages.shown(bias)}. Concatenate the two."
        )
    found = matrices(experts)
    for name, matrix in zip(names, found, strict=True):
        _check_matrix(f"{of}{name}", matrix, experts.transposed, bool(of), quantizes)
    halves = 2 if spec.gated and len(found) == 2 else 1
    down = _shape(experts.w_down)
    wanted = down and _first_shape(down, experts.transposed, halves)
    for name, (weights, *_) in zip(names[:-1], found, strict=False):
        if down and _shape(weights) not in ((), wanted):
            remedy = _remedy(experts, _shape(weights), halves)
            if not remedy:
                _check_gate(experts, of, spec)
            beside = (
                f"`w_down` of shape {down} and `activation` {messages.short(experts.activation)}"
            )
            arguments.check_shape(f"{of}{name}", _shape(weights), wanted, beside, remedy)
    return [(f"{of}{name}", matrix) for name, matrix in zip(names, found, strict=True)]


def _check_matrix(
    name: str, matrix: Matrix, transposed: bool, strict: bool, quantizes: bool
) -> None:
    weights, bias, _ = matrix
    scaled.check_no_bytes(name, weights, range(6))
    shape = _shape(weights)
    if 0 < len(shape) < 3 or (strict and len(shape) > 3):
        stacked = " Pass stacked layers one at a time, by `jax.lax.scan` or `jax.vmap`."
        raise ArgumentValueError(
            f"Argument `{name}` must have shape [{', '.join(_AXES)}]; got {shape}."
            f"{stacked if len(shape) > 3 else ''}"
        )
    of_bias = name.replace("w_", "b_")
    if shape and _shape(bias):
        wanted = (*shape[:-2], shape[-2 if transposed else -1])
        arguments.check_shape(of_bias, _shape(bias), wanted, f"`{name}`")
    if not strict:
        return
    floats: dict[str, Any] = {"wide": NOT_8_BITS, "convert": False}
    if bias is not None:
        arguments.array(of_bias, bias, ("experts", "columns"), jnp.floating, **floats)
    if not isinstance(weights, ScaledArray):
        arguments.array(name, weights, _AXES, jnp.floating, **floats)
        messages.check_sizes_known(name, shape)
    elif quantizes:
        raise ArgumentTypeError(
            f"Argument `{name}` is a ScaledArray, and `recipe` is given, which quantizes the "
            "weights itself. Dequantize the weights, or leave `recipe` out."
        )
    for product, copy in (matrix.in_8_bits or {}).items():
        if copy is not None:
            scaled.check(f"{name}` in 8 bits for `{product}", copy)


def _shape(value: Any) -> tuple[int, ...]:
    """Returns the shape of an array, or () for anything else."""
    array = value.values if isinstance(value, ScaledArray) else value
    if not jax_private.is_array(array):
        return ()
    return tuple(value.shape if array.ndim > 1 else array.shape)


def _first_shape(down: tuple[int, ...], transposed: bool, halves: int) -> tuple[int, ...]:
    """Returns the shape of the first matmul's weights that matches `down`, the second's."""
    *lead, width, hidden = down if not transposed else scaled.swapped(down)
    found = (*lead, hidden, halves * width)
    return scaled.swapped(found) if transposed else found


def _other_layout(experts: Experts) -> str:
    return (
        f" The weights would be right with `transposed={not experts.transposed}`: True is for "
        "[experts, out, in], as in torch."
    )


def _check_gate(experts: Experts, of: str, spec: GluSpec) -> None:
    """Raises if the first weights would fit an activation with a gate, or one without."""
    first, down = _shape(experts.w_gate_up), _shape(experts.w_down)
    for transposed in (experts.transposed, not experts.transposed):
        alone, both = (_first_shape(down, transposed, halves) for halves in (1, 2))
        if first != (alone if spec.gated else both):
            continue
        weights = f"`{of}w_gate_up` of shape {first}"
        if spec.gated:
            rule = f"no gate, because {weights} has `width` columns"
            other = f" With a gate `w_gate_up` has shape {both}, 2 × `width` columns."
        else:
            rule = f"a gate, because {weights} has 2 × `width` columns"
            other = f" Without a gate `w_gate_up` has shape {alone}, `width` columns."
        layout = "" if transposed == experts.transposed else _other_layout(experts)
        raise ArgumentValueError(
            f"Argument `{of}activation` must have {rule} beside `w_down` of shape {down}; got "
            f"{messages.short(experts.activation)}.{activations.remedy_by_gate(spec)}{other}{layout}"
        )


def _remedy(experts: Experts, first: tuple[int, ...], halves: int) -> str:
    """Returns a hint if the weights would fit another layout."""
    down, transposed = _shape(experts.w_down), experts.transposed
    to = functools.partial(_first_shape, transposed=transposed, halves=halves)
    ways = (
        (first == to(down, transposed=not transposed), _other_layout(experts)),
        (scaled.swapped(first) == to(down), " It would be right with its last two axes swapped."),
        (
            first == to(scaled.swapped(down)),
            " It would be right if `w_down` had its last two axes swapped.",
        ),
        (down == to(first), " They would be right in the other order."),
    )
    return next((remedy for fits, remedy in ways if fits), "")

"""Computes a layer's products, in the dtype of the tokens or in 8 bits as a recipe says.

With a recipe, the operands of two products are rounded by `quantize`: rows times weights, and the
incoming gradient times weights. The third product, of rows and gradient, is the weights' gradient:
its operands keep their own dtype, unless the recipe has a `weight_gradient`. The trained weights
keep all their bits.

The first product's rows are copies of tokens, and the second's are summed to tokens. Tokens are
quantized before they are copied, and so are their gradients: tokens are fewer than rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from triax import settings
from triax.moe.layer.experts import Matrix, in_8_bits
from triax.moe.layer.recipes import BLOCK, DTYPES, Scaling
from triax.moe.permutation.ops import permute_scaled, unpermute
from triax.moe.plans.reference import Plan
from triax.moe.products.ops import multiply
from triax.moe.products.options import FAST_SUMS, Groups, Options
from triax.moe.products.quantized_outer_ops import outer_in_8_bits
from triax.moe.quantization import ops as quantization
from triax.moe.quantization.scaled import ScaledArray
from triax.sharding import explicit


@dataclasses.dataclass(frozen=True)
class Products:
    """A layer's products, by a recipe and the layout of the weights.

    `precision` is JAX's default matmul precision where the layer is called, and `one_order` is as
    in `Options`.
    """

    recipe: Any  # a Recipe, or None
    transposed: bool
    implementation: Any
    precision: str | None = dataclasses.field(
        default_factory=lambda: jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    )
    one_order: bool = dataclasses.field(default_factory=settings.one_order_of_sums)

    def rows_gradient(
        self, gradient: Any, matrix: Matrix, sizes: Any, dtype: Any, target: Plan | None
    ) -> jax.Array:
        """Returns the gradient of the rows; with the plan `target`, from a gradient of tokens."""
        if self.recipe is not None:
            arguments = self.recipe.rows_gradient, gradient, self.recipe.gradient_dtype
            gradient = self.quantized(*arguments)
        gradient = self.moved(gradient, target)
        return self.product("rows_gradient", gradient, matrix, sizes, dtype)

    def product(
        self, name: str, rows: Any, matrix: Matrix, sizes: Any, dtype: Any, **more: Any
    ) -> jax.Array:
        """Returns rows, which are quantized if the recipe says so, times weights for a product."""
        scaling, weights = getattr(self.recipe, name, None), matrix.weights
        if scaling is None:
            more["transposed"] = self.transposed == (name == "forward")
        elif matrix.in_8_bits is not None:
            weights = matrix.in_8_bits[name]
        else:
            weights = in_8_bits(scaling, weights, name, self.transposed, self.implementation)
        if scaling is not None and self.recipe.fast_sums:
            more["precision"] = FAST_SUMS
        return self.dot(rows, weights, sizes, dtype, **more)

    def other_gradients(
        self,
        wanted: Collection[str],
        rows: Any,
        gradient: Any,
        matrix: Matrix,
        sizes: Any,
        bias_weights: Any,
        source: Plan | None,
        target: Plan | None,
    ) -> dict[str, Any]:
        """Returns the gradients in `wanted` of "weights", "bias" and "bias_weights", by name."""
        active = {"weights": matrix.weights, "bias": matrix.bias, "bias_weights": bias_weights}
        active = {n: array for n, array in active.items() if n in wanted and array is not None}
        gradients: dict[str, Any] = {}
        if self.recipe is not None and self.recipe.weight_gradient and "weights" in active:
            del active["weights"]
            sides: list[Any] = [
                (rows, self.named(source), DTYPES[0]),
                (gradient, self.named(target), self.recipe.gradient_dtype),
            ]
            if self.transposed:
                sides.reverse()
            (left, right), sources, dtypes = zip(*sides, strict=True)
            gradients["weights"] = outer_in_8_bits(
                left,
                right,
                sizes,
                sources=sources,
                dtypes=dtypes,
                result_dtype=matrix.weights.dtype,
                fast_sums=self.recipe.fast_sums,
                implementation=self.implementation,
            )
        if active:
            rows, gradient = self.moved(rows, source), self.moved(gradient, target)

            def plain(active: dict[str, Any]) -> jax.Array:
                right = {"weights": matrix.weights, "bias": matrix.bias} | active
                if right["bias"] is not None:
                    right.setdefault("bias_weights", bias_weights)
                dtype = rows.dtype
                return self.dot(rows, sizes=sizes, dtype=dtype, transposed=self.transposed, **right)

            # A product in 8 bits may be sharded over other explicit axes than this product.
            out, pull = jax.vjp(plain, active)
            gradients |= pull(explicit.cast(gradient, explicit.type_of(out)))[0]
        return gradients

    def quantized(self, scaling: Scaling | None, rows: jax.Array, dtype: str = DTYPES[0]) -> Any:
        """Returns the rows in 8 bits, or unchanged without a scaling."""
        if scaling is None:
            return rows
        block = (1, None if scaling == "rows" else BLOCK)
        options: dict[str, Any] = {"block": block, "implementation": self.implementation}
        return quantization.quantized(rows, dtype, **options)

    def dot(
        self,
        rows: Any,
        weights: Any,
        sizes: jax.Array,
        dtype: Any,
        *,
        bias: jax.Array | None = None,
        bias_weights: jax.Array | None = None,
        transposed: bool = False,
        precision: str | None = None,
    ) -> jax.Array:
        """Multiplies rows by weights, which are [experts, out, in] if `transposed`."""
        if isinstance(weights, ScaledArray):
            weights = weights.mT if transposed else weights
            transposed = weights.transposed
        operands = rows, weights, Groups(sizes), bias, bias_weights, transposed
        options = Options(jnp.dtype(dtype), precision or self.precision, one_order=self.one_order)
        # A context, too: plain JAX reads the default, which may differ where it is traced later.
        with jax.default_matmul_precision(self.precision):
            return multiply(*operands, options, implementation=self.implementation)

    def moved(self, tokens: Any, plan: Plan | None) -> Any:
        """Permutes tokens to rows; without a plan returns them unchanged."""
        path: dict[str, Any] = {"implementation": self.implementation}
        return tokens if plan is None else permute_scaled(tokens, plan, **path)

    def summed(self, rows: jax.Array, plan: Plan | None) -> jax.Array:
        """Sums rows to tokens; without a plan returns them unchanged."""
        return rows if plan is None else unpermute(rows, plan, implementation=self.implementation)

    def named(self, plan: Plan | None) -> jax.Array | None:
        """Returns the token of each row, -1 for rows without one; None without a plan."""
        if plan is None:
            return None
        number = jnp.arange(1, plan.row_of.shape[0] + 1, dtype=jnp.int32)
        rows: jax.Array = self.moved(number[:, None], plan)[:, 0]
        return rows - 1

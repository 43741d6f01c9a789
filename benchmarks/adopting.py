"""The MoE layers of other codebases, as they are and with the patches of `docs/adopting/`.

Give the codebase, and the folders that its package is imported from: as it is, and patched. Both
are timed in turn in one process, in bfloat16, after their results were compared. The record keeps
what it holds of other codebases.

    python -m benchmarks.adopting haliax ORIGINAL PATCHED [--output FILE] [--small]

`--small` tries the script with tiny sizes; it needs no GPU, and writes no times of one.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

from benchmarks.harness import record
from benchmarks.harness.inputs import normal
from benchmarks.harness.inputs import with_gradients as of_ones
from benchmarks.harness.timing import median_us, wall_ms

TOLERANCE = 0.02  # of the norm of each result and gradient
ROUNDS = 3
LONG_S = 0.05  # programs that take longer are timed by the host's clock


def load(folder, name):
    """The module `name` as imported from `folder`, whatever was imported before."""
    package = name.partition(".")[0]
    for known in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        del sys.modules[known]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
    if Path(folder).resolve() not in Path(module.__file__).resolve().parents:
        sys.exit(f"{name} comes from {module.__file__}, not from {folder}")
    return module


def with_gradients(function):
    """Results and gradients of all of the operands, for a gradient of ones."""
    return of_ones(function, jnp.ones_like)


def uneven(rows, groups):
    """Sizes that sum up to `rows`: those of random choices."""
    chosen = jax.random.randint(jax.random.key(7), (rows,), 0, groups)
    return jnp.bincount(chosen, length=groups).astype(jnp.int32)


# Each codebase: the name of each case, ways to run it with the code of a folder, and what makes its
# operands. The ways of the patched folder are compared with all of the original's.


def jax_llm_examples(folder, patched, small):
    """The block of gpt-oss, forward: it is a codebase for inference."""
    model = load(folder, "gpt_oss_jax.model")
    configs = importlib.import_module("gpt_oss_jax.configs")
    mesh = jax.make_mesh((1, 1, 1), ("x", "y", "z"), axis_types=(AxisType.Explicit,) * 3)
    jax.set_mesh(mesh)
    for name in ("GPT_OSS_20B", "GPT_OSS_120B"):
        sizes = {"embed": 64, "moe_ffw_size": 64, "moe_num_experts": 8} if small else {}
        config = vars(getattr(configs, name)) | {"mesh": mesh, "num_layers": 1} | sizes
        config = model.Config(**config)

        def operands(batch, length, config=config):
            layer = model.MoELayer.init(jax.random.key(0), config)
            return normal(1, batch, length, config.embed), layer

        def block(given, config=config):
            return model.moe_block(*given, config)

        for label, shape in (("8,192 tokens", (1, 8192)), ("decoding, 128 tokens", (128, 1))):
            shape = (shape[0] // 16 or 1, shape[1] // 128 or 1) if small else shape
            label = f"{name.replace('GPT_OSS_', 'gpt-oss-').lower()}, {label}"
            yield label, {"": block}, functools.partial(operands, *shape)


def haliax(folder, patched, small):
    """`ragged_dot`, and experts made of it, as in Mixtral 8x7B's layer of 8,192 tokens."""
    ragged_dot = load(folder, "haliax.nn.ragged_dot").ragged_dot
    rows, hidden, width, groups = (128, 64, 96, 4) if small else (16384, 4096, 14336, 8)
    sizes = uneven(rows, groups)

    def product(way, given):
        return ragged_dot(*given[:2], sizes, implementation=way)

    def experts(way, given):
        x, up, down = given
        gate, linear = jnp.split(ragged_dot(x, up, sizes, implementation=way), 2, axis=-1)
        return ragged_dot(jax.nn.silu(gate) * linear, down, sizes, implementation=way)

    def half_full(way, given):
        x, up, down = given
        # Expert parallel: the buffer's rows past the groups are multiplied too, and hidden.
        filled = sizes // 2
        known = (jnp.arange(rows) < filled.sum())[:, None]
        sized = filled if patched else filled.at[-1].add(rows - filled.sum())
        x = x if patched else jnp.where(known, x, 0)
        gate, linear = jnp.split(ragged_dot(x, up, sized, implementation=way), 2, axis=-1)
        out = ragged_dot(jax.nn.silu(gate) * linear, down, sized, implementation=way)
        return out if patched else jnp.where(known, out, 0)

    def operands():
        up = normal(1, groups, hidden, 2 * width, scale=hidden**-0.5)
        return normal(0, rows, hidden), up, normal(2, groups, width, hidden, scale=width**-0.5)

    ways = {"auto": "auto"} if patched else {"auto": "auto", "xla": "xla"}
    cases = {"ragged_dot": product, "experts": experts, "experts, buffer half full": half_full}
    for name, run in cases.items():
        found = {key: with_gradients(functools.partial(run, way)) for key, way in ways.items()}
        if not patched:
            kernels = with_gradients(functools.partial(run, "triton"))
            found["its kernels, with pallas.dot"] = functools.partial(with_dot, kernels)
        yield name, found, operands


def skyrl(folder, patched, small):
    """One of eight ranks, that has 16 of Qwen3-30B-A3B's 128 experts; and all of its experts."""
    ragged_dot = load(folder, "skyrl.tx.layers.util").ragged_dot
    qwen = importlib.import_module("skyrl.tx.models.qwen3")
    from flax import nnx

    rows, hidden, width, experts = (256, 64, 48, 16) if small else (65536, 2048, 768, 128)
    local = experts // 8
    sizes, offset = uneven(rows, experts), jnp.array([2 * local], jnp.int32)

    def product(given):
        return ragged_dot(*given, sizes, group_offset=offset)

    def operands():
        return normal(0, rows, hidden), normal(1, local, hidden, width, scale=hidden**-0.5)

    yield "ragged_dot, 16 of 128 experts", {"": with_gradients(product)}, operands
    of_model = {"num_experts": experts, "hidden_size": hidden, "moe_intermediate_size": width}
    of_model |= {"num_experts_per_tok": 8, "norm_topk_prob": True}
    config = types.SimpleNamespace(**of_model, max_lora_adapters=0, max_lora_rank=8)
    mesh = jax.make_mesh((1, 1, 1), ("fsdp", "ep", "tp"), axis_types=(AxisType.Auto,) * 3)
    jax.set_mesh(mesh)
    make = functools.partial(qwen.Qwen3Experts, config, dtype=jnp.bfloat16)
    graph = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))[0]

    def block(given):
        return nnx.merge(graph, given[0])(*given[1:])

    def all_operands():
        state = nnx.split(make(rngs=nnx.Rngs(0)))[1]
        return state, normal(3, rows // 32, hidden), normal(4, rows // 32, experts)

    yield "Qwen3-30B-A3B's experts, 2,048 tokens", {"": with_gradients(block)}, all_operands


def maxtext(folder, patched, small):
    """The block of Mixtral 8x7B, its weights in float32, as MaxText keeps them."""
    moe = load(folder, "maxtext.layers.moe")
    pyconfig = importlib.import_module("maxtext.configs.pyconfig")
    utils = importlib.import_module("maxtext.utils.maxtext_utils")
    initializers = importlib.import_module("maxtext.layers.initializers")
    from flax import nnx
    from flax.linen import partitioning

    length = 32 if small else 4096
    sizes = {"base_emb_dim": 64, "base_mlp_dim": 96, "base_moe_mlp_dim": 96} if small else {}
    for name, way in {
        "Mixtral 8x7B, 8,192 tokens": {},
        "the same, gate and up in one array": {"prefuse_moe_weights": True},
    }.items():
        config = pyconfig.initialize(
            [None, str(Path(moe.__file__).parents[1] / "configs" / "base.yml")],
            run_name="adopting",
            model_name="mixtral-8x7b",
            override_model_config=True,
            megablox=False,
            dtype="bfloat16",
            max_target_length=length,
            per_device_batch_size=2,
            enable_checkpointing=False,
            skip_jax_distributed_system=True,
            **sizes,
            **way,
        )
        mesh = Mesh(utils.create_device_mesh(config, jax.devices()[:1]), config.mesh_axes)
        jax.set_mesh(mesh)
        rules = functools.partial(partitioning.axis_rules, config.logical_axis_rules)

        def make(config=config, mesh=mesh):
            return moe.RoutedMoE(
                config=config,
                num_experts=config.num_experts,
                num_experts_per_tok=config.num_experts_per_tok,
                mesh=mesh,
                kernel_init=initializers.nd_dense_init(1.0, "fan_in", "truncated_normal"),
                kernel_axes=("embed", "mlp"),
                intermediate_dim=config.mlp_dim,
                dtype=config.dtype,
                weight_dtype=config.weight_dtype,
                rngs=nnx.Rngs(params=0),
            )

        def operands(make=make, rules=rules, hidden=config.emb_dim):
            with rules():
                return nnx.split(make())[1], normal(1, 2, length, hidden)

        def block(given, make=make, rules=rules):
            with rules():
                graph = nnx.split(nnx.eval_shape(make))[0]
                return nnx.merge(graph, given[0])(given[1])[0]

        yield name, {"": with_gradients(block)}, operands


CODEBASES = {
    "jax-llm-examples": jax_llm_examples,
    "haliax": haliax,
    "skyrl": skyrl,
    "maxtext": maxtext,
}


def with_dot(run, operands):
    """Runs haliax's kernels, which raise without `pallas.dot`, that JAX 0.11.2 removed."""
    pallas = importlib.import_module("jax.experimental.pallas")
    if hasattr(pallas, "dot"):
        return run(operands)

    def dot(a, b, trans_a=False, trans_b=False):
        axes = ((int(not trans_a),), (int(trans_b),)), ((), ())
        return jax.lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)

    pallas.dot = dot
    try:
        return run(operands)
    finally:
        del pallas.dot


def time_ms(program, operands):
    """The median of some calls, or the mean of two that are long."""
    start = time.perf_counter()
    jax.block_until_ready(program(operands))
    if time.perf_counter() - start < LONG_S:
        return median_us(program, operands) / 1e3
    return wall_ms(program, operands, samples=1, calls=2)


def measure(ways, operands):
    """The medians of all ways in turn, those that run, against the last one, the patched."""
    found, programs, results = {name: {} for name in ways}, {}, {}
    for name in reversed(ways):
        # Else haliax's "auto" finds the kernels that were traced in `with_dot`, and does not raise.
        jax.clear_caches()
        try:
            program = jax.jit(ways[name]).lower(operands).compile()
            result = jax.block_until_ready(program(operands))
        except Exception as error:
            found[name]["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        results.setdefault("patched", result)
        off = found[name]["difference"] = record.difference(result, results["patched"])
        if off <= TOLERANCE:
            programs[name] = program
        else:
            found[name]["error"] = f"the results differ by {off}"
        del result
    results.clear()
    times = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            times[name].append(time_ms(program, operands))
    for name, each in times.items():
        found[name]["ms"] = sorted(each)[len(each) // 2]
    last = found["patched"]
    for one in found.values():
        if "ms" in one and "ms" in last:
            one["of_patched"] = one["ms"] / last["ms"]
    return found


def main():
    parser = record.parser(__file__, __doc__)
    parser.add_argument("codebase", choices=CODEBASES)
    parser.add_argument("original", type=Path)
    parser.add_argument("patched", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args() if "--small" in sys.argv else record.parse(parser)
    cases = CODEBASES[options.codebase]
    both = [
        cases(folder, patched, options.small)
        for patched, folder in enumerate((options.original, options.patched))
    ]
    found = {}
    known = record.known(options.output)["results"] if options.output.exists() else {}
    for (name, before, operands), (_, after, _) in zip(*both, strict=True):
        ways = {f"original, {way}".removesuffix(", "): run for way, run in before.items()}
        (ways["patched"],) = after.values()
        found[name] = measure(ways, operands())
        print(name, record.shown(found[name]), flush=True)
        record.write(options.output, results=known | {options.codebase: found})


if __name__ == "__main__":
    main()

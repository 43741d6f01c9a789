"""Two GPUs and more: a sharded program is tuned once and runs on all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.cases import CASES, argsort_then_gather, vector_add
from tests.moe import test_sharding as cut
from tests.moe.expert_parallel import test_expert_parallel as expert_parallel
from tests.moe.expert_parallel import test_processes
from triax import moe, testing
from triax.moe.expert_parallel import exchange, launchers
from triax.tuning import measure, policy, store
from triax.tuning.worker import client

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:ragged_dot dequantizes its weights"),  # some do, rightly
]


@pytest.fixture
def mesh():
    devices = jax.devices("gpu")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    return Mesh(np.array(devices), ("d",))


def test_sharded_program_is_tuned_once(mesh, monkeypatch):
    policy.forget()
    jobs = []
    original = measure.measure

    def spy(job, device, *arguments):
        jobs.append(device)
        original(job, device, *arguments)

    monkeypatch.setattr(measure, "measure", spy)
    count = mesh.size
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count * 512, 256)).astype(np.float32)
    keys = np.concatenate([rng.permutation(512) for _ in range(count)]).astype(np.float32)
    function = jax.jit(
        jax.shard_map(
            lambda x, k: argsort_then_gather(x, k),
            mesh=mesh,
            in_specs=(P("d"), P("d")),
            out_specs=P("d"),
        )
    )
    sharding = NamedSharding(mesh, P("d"))
    out = function(jax.device_put(x, sharding), jax.device_put(keys, sharding))
    parts = zip(np.split(x, count), np.split(keys, count), strict=True)
    testing.assert_same_bits(out, np.concatenate([p[np.argsort(k)] for p, k in parts]))
    assert len(out.sharding.device_set) == count
    assert len(jobs) == 1
    assert len(store.user_store().paths()) == 1


def test_plain_jit_does_not_depend_on_sharding(mesh):
    x = np.arange(mesh.size * 128, dtype=np.float32)
    sharded = jax.device_put(x, NamedSharding(mesh, P("d")))
    testing.assert_same_bits(jax.jit(vector_add)(sharded, sharded), 2 * x)
    rows = x.reshape(-1, 8)
    sizes = np.array([len(rows) // 2, len(rows) - len(rows) // 2], np.int32)
    order = np.array([1, 0], np.int32)
    expected = np.concatenate([rows[sizes[0] :], rows[: sizes[0]]])
    for spec in (P("d"), P(None, None)):
        moved = jax.jit(moe.sort_chunks_by_index)(
            jax.device_put(rows, NamedSharding(mesh, spec)), sizes, order
        )
        testing.assert_same_bits(moved.rows, expected)


@pytest.mark.parametrize("index", [0, 1])
def test_each_gpu_alone(mesh, index):
    """The config is measured on, and the kernel runs on, the GPU the program is lowered for."""
    policy.forget()
    device = list(mesh.devices.flat)[index]
    case = next(c for c in CASES if c.name == "gather")
    inputs = case.inputs(np.random.default_rng(7))
    out = jax.jit(lambda *args: case.function(*args))(*(jax.device_put(i, device) for i in inputs))
    case.check(out, inputs)
    assert out.devices() == {device}
    assert client._workers[index].alive


@pytest.mark.parametrize("kind", ["not routed", "one device"])
@pytest.mark.parametrize("way", ["the kernel", "all_to_all"])
def test_expert_parallel_equals_one_gpu(monkeypatch, mesh, way, kind):
    monkeypatch.setattr(exchange, "_say_padded", pytest.fail)
    launches, launch = [], launchers.exchange_rows
    spy = lambda *operands, **forms: launches.append(forms) or launch(*operands, **forms)
    monkeypatch.setattr(launchers, "exchange_rows", spy)
    if way == "all_to_all":
        monkeypatch.setattr(exchange, "_between_gpus", lambda *_, **__: None)
    o, experts = expert_parallel.operands(kind, 8)
    on_all = expert_parallel.on_all(mesh, "d")

    def run(function):
        y, pull = jax.vjp(lambda o: function(o, experts), o)
        upstream = np.sin(np.arange(y.size, dtype=np.float32)).reshape(y.shape)
        first = jax.grad(lambda o: jnp.vdot(jnp.sin(function(o, experts)), upstream))
        second = jax.grad(lambda o: jnp.vdot(first(o)["x"], upstream))
        return y, pull(upstream)[0], second(o)

    results = (jax.jit(run, static_argnums=0)(f) for f in (on_all, expert_parallel.on_one_device))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    jax.tree.map(close, *results)
    assert bool(launches) == (way == "the kernel")


def test_expert_parallel_of_two_processes_equals_one(mesh, tmp_path):
    if mesh.size % 2:
        pytest.skip("needs an even number of GPUs")
    no_memory_ahead = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process has most of it
    errors = test_processes.compare_with_two_processes(tmp_path, mesh.size, **no_memory_ahead)
    assert "padded" not in errors
    assert "channels: 1" in errors


@pytest.mark.parametrize("name", cut.WITH_COLUMNS)
def test_cut_columns_move_nothing_between_gpus(mesh, name):
    cut.check_columns(name, mesh, "d")


def test_the_layers_tokens_stay_on_their_gpu(mesh):
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,))
    specs = {name: P("d") for name in ("x", "logits", "g_tokens")}
    program, results = cut.check("feed_forward, sigmoids", mesh, specs)
    assert set(cut.collectives(program)) <= {"all-reduce", "all-reduce-start"}
    for name in ("x", "logits", "w_gate_up", "w_down"):
        assert cut.spec_of(results[f"d_{name}"]) == specs.get(name, P())


@pytest.mark.parametrize("name", cut.NAMES)
def test_results_on_gpus_do_not_depend_on_shardings(mesh, name):
    arrays = cut.drawn(name)[1]
    cut.check(name, mesh, {n: P("d") for n, a in arrays.items() if len(a) % mesh.size == 0})

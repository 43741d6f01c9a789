"""`triax.benchmark` of users' functions, and `triax bench FILE:FUNCTION`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import triax
from tests.tools.test_cli import program
from triax import cli
from triax.bench import functions
from triax.bench.timing import CallTiming
from triax.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

X = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)


def double(x):
    return x + x


def twice(x):
    return x * 2


def off(x):
    return x * 2.01


@pytest.fixture
def timed(monkeypatch):
    """Times by rule in place of a clock's, on a GPU that is not here; what was timed, in order."""

    def install(time, method="events"):
        names = []

        def time_program(program, inputs, **how):
            names.append(program.__wrapped__.__name__)
            us = time(names[-1], len(names))
            return CallTiming(us, us, us, 10, method)

        def named(function, rebuild):
            wrapped = lambda inputs: function(*rebuild(inputs))
            wrapped.__name__ = function.__name__
            return jax.jit(wrapped)

        monkeypatch.setattr(functions, "_jitted", named)
        monkeypatch.setattr(functions, "time_program", time_program)
        return names

    return install


def test_table_and_ratios_within_rounds(timed):
    """The clock slows down by the round; the ratio stays."""
    slower = lambda number: 1 + (number - 1) // 2
    names = timed(lambda name, number: {"double": 10.0, "twice": 25.0}[name] * slower(number))
    found = triax.benchmark(double, X, against={"by a product": twice})
    assert names[:6] == ["double", "twice", "twice", "double", "double", "twice"]
    assert found.times["double"].median_us == 30
    assert found.times["double"].samples == 50
    assert found.ratios == {"by a product": functions.Ratio(2.5, 2.5, 2.5)}
    assert str(found).splitlines() == [
        "cpu              µs       10% to 90%  times as long",
        "double        30.00   14.00 to 46.00",
        "by a product  75.00  35.00 to 115.00  2.50× (2.50 to 2.50)",
    ]


def test_no_ratio_where_the_host_was_too_slow(timed):
    timed(lambda name, number: 10.0, method="host-bound")
    found = triax.benchmark(double, X, against=twice)
    assert found.ratios == {}
    assert "≤10.00" in str(found)
    assert str(found).endswith("the device took this long at most")


@pytest.mark.parametrize(
    ("read", "written", "stream"),
    [
        (1 << 22, 1 << 22, (1, 1, 1 << 22)),
        (3 << 20, 1 << 20, (3, 1, 1 << 20)),
        (1 << 20, 1 << 30, (1, 8, ((1 << 20) + (1 << 30)) // 9)),
        (1 << 18, 1 << 18, None),
        (1 << 22, 0, None),
    ],
)
def test_the_limit_of_memory(monkeypatch, read, written, stream):
    asked = []
    limit = lambda of: asked.append(tuple(of)) or {"bytes": (read + written) // 2, "median_us": 3.0}
    monkeypatch.setattr(functions, "find_limit", limit)
    assert functions._stream_us(read, written) == (None if stream is None else 6.0)
    assert asked == ([] if stream is None else [stream])


def test_no_limit_where_there_is_no_memory_for_it(monkeypatch):
    def fail(stream):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(functions, "find_limit", fail)
    assert functions._stream_us(1 << 30, 1 << 30) is None


def test_the_limit_stands_in_the_table(timed, monkeypatch):
    timed(lambda *_: 10.0)
    monkeypatch.setattr(functions, "is_cuda", lambda device: True)
    monkeypatch.setattr(functions, "_stream_us", lambda read, written: (read + written) / 300)
    assert str(triax.benchmark(double, X)).splitlines()[-1].split() == [
        "limit", "of", "memory", "8.00", "0.80×"
    ]  # fmt: skip


def test_on_the_cpu():
    found = triax.benchmark(double, {"a": X}["a"], against=twice)
    assert [*found.times] == ["double", "twice"]
    assert found.times["twice"].method == "host clock"
    assert found.ratios["twice"].low <= found.ratios["twice"].median <= found.ratios["twice"].high
    assert found.stream_us is None
    assert "by the host's clock" in repr(found)


def test_what_is_no_array_is_a_constant(timed):
    timed(lambda name, number: 1.0)

    def power(arrays, exponent, how):
        assert (exponent, how) == (3, "fast")
        return [arrays["x"] ** exponent]

    triax.benchmark(power, {"x": X}, 3, "fast", against={"power": lambda a, *_: (a["x"] ** 3,)})


class TestWrong:
    @pytest.mark.parametrize(
        ("other", "text"),
        [
            (off, r"'off' and 'double' do not compute the same: result 0 differs by up to 0.005"),
            (lambda x: x.sum(), r"the results have shapes \[\(\)\] and \[\(6, 50\)\]"),
            (lambda x: (2 * x).astype(int), "result 0 is int32 and float32"),
            (lambda x: x * jnp.nan, "result 0 differs by up to nan"),
            (lambda x: jnp.complex64(2) * x, "result 0 is complex64 and float32"),
        ],
    )
    def test_is_not_timed(self, timed, other, text):
        names = timed(lambda *_: 1.0)
        with pytest.raises(ArgumentValueError, match=text):
            triax.benchmark(double, X, against=other)
        assert names == []

    def test_integers_must_be_equal(self):
        near = lambda x: x * 2 + (x == 3)
        with pytest.raises(ArgumentValueError, match="1 of 5 elements of result 0 differ"):
            triax.benchmark(double, jnp.arange(5), against=near)

    def test_unless_that_is_asked_for(self, timed):
        names = timed(lambda *_: 1.0)
        triax.benchmark(double, X, against=off, compare=False)
        triax.benchmark(double, X, against=off, tolerance=0.006)
        assert len(names) == 20

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float16", "complex64"])
    def test_by_the_dtype(self, timed, dtype):
        timed(lambda *_: 1.0)
        x = jnp.asarray(X / 4, dtype)
        wide = jnp.promote_types("float32", dtype) if dtype == "complex64" else "float32"
        times = lambda factor: lambda x: (x.astype(wide) * factor).astype(dtype)
        triax.benchmark(times(2), x, against={"same": times(2)})
        with pytest.raises(ArgumentValueError, match=r"differs by up to 0\.25"):
            triax.benchmark(times(2), x, against={"other": times(1.5)})


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: triax.benchmark(3, X), ArgumentTypeError, "`function` must be a function; got 3"),
        (lambda: triax.benchmark(double, X, against=3), ArgumentTypeError, "`against` must be a f"),
        (
            lambda: triax.benchmark(double, X, against={"a": 3}),
            ArgumentTypeError,
            "functions by their names; got 3 of type int for 'a'",
        ),
        (lambda: triax.benchmark(double, 3), ArgumentValueError, "must have an array among them"),
        (lambda: triax.benchmark(lambda x: None, X), ArgumentValueError, "must return an array"),
        *(
            (
                lambda wrong=wrong: triax.benchmark(double, X, against=double, tolerance=wrong),
                ArgumentTypeError,
                "`tolerance` must be a number of at least 0",
            )
            for wrong in (-1, "1e-3", float("nan"))
        ),
        (
            lambda: jax.jit(lambda x: triax.benchmark(double, x))(X),
            ArgumentTypeError,
            r"must be arrays with values; got traced float32\[6,50\].*outside of `jax.jit`",
        ),
        (
            lambda: jax.jit(lambda x: triax.benchmark(double, X))(X),
            ArgumentTypeError,
            "got a call inside a function that is being traced",
        ),
    ],
)
def test_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_arrays_elsewhere():
    x = jax.device_put(X, jax.devices()[1])
    with pytest.raises(UnsupportedError, match=r"must be on .*; one is on .*`jax.device_put`"):
        triax.benchmark(double, x)


class TestCommand:
    def test_shows_what_a_function_returns(self, tmp_path, capsys):
        file = program(
            tmp_path,
            "import jax.numpy as jnp, triax\n"
            "def main():\n"
            "    x = jnp.ones((3, 4))\n"
            "    one = triax.benchmark(lambda x: x + x, x, against={'other': lambda x: 2 * x})\n"
            "    return [one, one]\n",
        )
        assert cli.main(["bench", f"{file}:main"]) == 0
        assert capsys.readouterr().out.count("\nother ") == 2

    def test_wrong_results_fail(self, tmp_path, capsys):
        text = "import jax.numpy as jnp, triax\ndef main():\n    return triax.benchmark("
        text += "jnp.sin, jnp.ones(3), against=jnp.cos)\n"
        assert cli.main(["bench", f"{program(tmp_path, text)}:main"]) == 1
        said = capsys.readouterr()
        assert "'cos' and 'sin' do not compute the same" in said.err
        assert said.out == ""

    def test_a_function_that_returns_something_else(self, tmp_path, capsys):
        file = program(tmp_path, "def main():\n    return 3\n")
        assert cli.main(["bench", f"{file}:main"]) == 1
        assert "returns, or a list of those; got 3 of type int" in capsys.readouterr().err

    def test_the_suites_flags_are_not_for_it(self, capsys):
        for words in (["--json", "file"], ["--no-competitors"], ["--tokens", "8"]):
            assert cli.main(["bench", "file.py:main", *words]) == 1
            assert f"`{words[0]}` is for suites" in capsys.readouterr().err

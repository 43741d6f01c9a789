"""Compiles one program with JAX's persistent cache on, and says whether it hit."""

import json
import sys
import time

start = time.perf_counter()
import jax  # noqa: E402
import numpy as np  # noqa: E402

jax.config.update("jax_enable_compilation_cache", True)  # the tests run without it
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
jax.block_until_ready(jax.numpy.ones(3) + 1)
ready = time.perf_counter()

from tests.cases import CASES  # noqa: E402
from triax.emitting.reading import triton_calls  # noqa: E402

names = ("vector_add", "matmul", "gather")
opaque = {}
del events[:]
for case in CASES:
    if case.name in names:
        inputs = case.inputs(np.random.default_rng(7))
        function = jax.jit(case.function)
        lowered = function.lower(*inputs)
        opaque[case.name] = [call.opaque.hex() for call in triton_calls(lowered)]
        case.check(lowered.compile()(*inputs), inputs)
hits = sum(event == "/jax/compilation_cache/cache_hits" for event in events)
misses = sum(event == "/jax/compilation_cache/cache_misses" for event in events)
print(
    json.dumps(
        {"hits": hits, "misses": misses, "opaque": opaque, "seconds": time.perf_counter() - ready}
    )
)
